"""The trainer of the demo model: one GPU, commands of any length, each going on where the last one stopped."""
