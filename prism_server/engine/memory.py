"""How many bytes are left for pages on a GPU where everything else has been measured. Pure arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from prism_server.capacity.units import MIB

RESERVE_BYTES = 256 * MIB
"""Kept free beside everything that was measured: what the driver takes later, and fragments that no request fits in."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes of one GPU, measured before its pages are allocated."""

    usable_bytes: int
    """The fraction of the card, or of this server's part of it, that the settings allow."""
    free_bytes: int
    """What the card had left then: a card may be used by others, too."""
    weight_bytes: int
    """Weights and buffers of fixed size."""
    step_bytes: int
    """The most that the largest encoder item, the largest chunk and the sampler took."""
    graph_bytes: int
    """Estimated from the largest graphs."""
    feature_bytes: int
    """What the settings allow for encoder outputs."""
    planned_bytes: int
    """For pages by the plan on paper, which knows nothing of this card's kernels and graphs; to compare."""
    reserve_bytes: int = RESERVE_BYTES

    @property
    def working_bytes(self) -> int:
        """What must stay free of pages beside the weights, graphs not counted."""
        return self.step_bytes + self.feature_bytes + self.reserve_bytes

    @property
    def pool_bytes(self) -> int:
        """For pages; negative when the rest alone is too much."""
        return min(self.usable_bytes - self.weight_bytes, self.free_bytes) - self.graph_bytes - self.working_bytes

    def explain(self) -> str:
        """The sum in one line."""
        return (
            f"min({_mib(self.usable_bytes)} usable - {_mib(self.weight_bytes)} weights, {_mib(self.free_bytes)} free) "
            f"- {_mib(self.step_bytes)} largest step - {_mib(self.graph_bytes)} graphs "
            f"- {_mib(self.feature_bytes)} encoder outputs - {_mib(self.reserve_bytes)} reserve "
            f"= {_mib(self.pool_bytes)} for pages (on paper {_mib(self.planned_bytes)})"
        )

    def as_dict(self) -> dict[str, int]:
        return asdict(self) | {"pool_bytes": self.pool_bytes}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.0f} MiB"
