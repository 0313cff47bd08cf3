"""From messages to token ids, positions, spans and keys; and from token ids back to text."""
