"""Who runs and who waits."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism_server.engine.plan_builder import PlanBuilder
from prism_server.engine.sequence import Phase, Sequence


@dataclass(slots=True)
class Queues:
    """Every live sequence is in exactly one of these."""

    running: list[Sequence] = field(default_factory=list)
    """Admitted, oldest first."""
    waiting: list[Sequence] = field(default_factory=list)
    parked: list[Sequence] = field(default_factory=list)
    """Wait for what another sequence is computing."""

    @property
    def num_uncached_tokens(self) -> int:
        """Prompt tokens that all of them still have to compute, as far as is known."""
        waiting = sum(sequence.uncached_estimate for sequence in (*self.waiting, *self.parked))
        running = (sequence for sequence in self.running if sequence.phase is not Phase.DECODE)
        return waiting + sum(sequence.remaining_prefill for sequence in running)

    def oldest_runnable(self) -> Sequence | None:
        """The oldest admitted sequence that waits neither for media nor for a swap."""
        return next((s for s in self.running if s.phase in (Phase.PREFILL, Phase.DECODE)), None)

    def youngest_victim(self, builder: PlanBuilder, sequence: Sequence) -> Sequence | None:
        """The youngest after `sequence` of which the plan has neither rows nor encoder blocks: those need its pages and
        pins."""
        for other in reversed(self.running):
            if other.number <= sequence.number:
                return None
            if other.number not in builder.planned and other not in builder.encodes_for:
                return other
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless sequences are where their phases say, and those that wait hold nothing."""
        assert all(sequence.is_admitted for sequence in self.running)
        assert [s.number for s in self.running] == sorted(s.number for s in self.running)
        assert all(sequence.phase is Phase.WAITING and not sequence.table for sequence in self.waiting)
        assert all(sequence.phase is Phase.PARKED and not sequence.table for sequence in self.parked)
        assert all(not sequence.pins for sequence in (*self.waiting, *self.parked)), "who waits holds encoder output"
