"""How far a start is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A stage and, where it has a size, how much of it is done: bytes, or whatever the stage counts."""

    stage: str
    done: int = 0
    total: int = 0


OnProgress = Callable[[Progress], None]
