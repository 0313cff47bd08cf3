"""The router's life: starting, ready, leaving, draining. Who is inside. Event loop only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Phase = Literal["starting", "ready", "leaving", "draining"]


@dataclass
class Lifecycle:
    phase: Phase = "starting"
    inside: int = 0
    """Requests between their arrival and their last byte."""

    def ready(self) -> None:
        """The pods are known, however many there are."""
        if self.phase == "starting":
            self.phase = "ready"

    def leave(self) -> None:
        """Not ready any more; whoever has not heard of it yet is still served."""
        self.phase = "leaving"

    def drain(self) -> None:
        """Nobody new; those inside go on."""
        self.phase = "draining"

    @property
    def is_going(self) -> bool:
        """Whether connections should not be kept."""
        return self.phase in ("leaving", "draining")

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request is inside the block."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
