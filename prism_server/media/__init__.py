"""From bytes to facts to patches. No torch."""
