"""The engine: one owner thread, a pure scheduler, a runner that executes its plans."""
