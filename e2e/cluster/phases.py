"""Prints how long each part of the work took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Times the block, and says so when it is done; a block that fails prints nothing more."""
    start = time.monotonic()
    yield
    print(f"{time.monotonic() - start:8.1f} s  {name}", flush=True)
