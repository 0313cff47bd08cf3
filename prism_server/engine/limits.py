"""The sizes that bound the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Sizes that bound a step and the sets of sequences."""

    max_context_tokens: int
    max_running_sequences: int
    max_step_tokens: int
    chunk_tokens: int = 0
    """0: a prefill chunk is as long as the step allows."""
    step_budget_ms: float = 24.0
    max_replayed_tokens: int = 0
    """Rows of the largest graph; 0 without graphs. No step is larger: see `CostModel`."""
    ageing_s: float = 2.0
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_running_sequences:
            raise ValueError("a step must hold a decode of every running sequence")
