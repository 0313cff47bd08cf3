"""What fits: the bytes of a page, the pages of a GPU, the shapes of the known models. Pure arithmetic, no torch."""
