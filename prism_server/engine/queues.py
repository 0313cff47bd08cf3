"""Who runs and who waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism_server.engine.sequence import Sequence


@dataclass(slots=True)
class Queues:
    """Every live sequence is in exactly one of these."""

    running: list[Sequence] = field(default_factory=list)
    """Admitted, oldest first."""
    waiting: list[Sequence] = field(default_factory=list)
    parked: list[Sequence] = field(default_factory=list)
    """Wait for what another sequence is computing."""
