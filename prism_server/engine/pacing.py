"""When to plan the next step: late enough to take along who has just come, early enough that the device never waits."""

from __future__ import annotations

from prism_server.engine.plan import StepPlan, StepResult

LEAST_LEAD_S = 0.0005
LEAD_OF_TURNS = 1.5
"""A plan and its launch get the time of the slowest turn of late, and half of it again."""
FORGETTING = 0.98
"""A turn; a slow one is half forgotten after 34."""
LEAST_WAIT_S = 0.0001
"""Who waited less for a step came after its end."""


class Pacing:
    """Knows how long a step takes that is like the one before it, and how long planning and launching take.

    A step is launched while another is in flight. Done at once, that leaves who arrives a moment later out for a whole
    step more; so the owner goes on taking commands until shortly before the step in flight ends. Only decodes repeat
    themselves: after any other step there is no waiting. Pure: times come from the caller.
    """

    def __init__(self) -> None:
        self._slowest_turn_s = 0.0
        self._until_s = 0.0
        self._last_decode_ms = 0.0

    def lingers_for_s(self, now_s: float) -> float:
        """How long the owner may wait for commands before it plans; 0 or less: not at all."""
        return self._until_s - now_s

    def launched(self, turn_s: float) -> None:
        """Planning and launching a step took so long."""
        self._slowest_turn_s = max(turn_s, self._slowest_turn_s * FORGETTING)

    def step_over(
        self, now_s: float, waited_s: float, plan: StepPlan, result: StepResult, following: StepPlan | None
    ) -> None:
        """`plan`'s step has been waited for and has ended; `following`, already launched, began then.

        Of the last two decodes the shorter one counts: one that was held up says nothing about the next.
        """
        self._until_s = 0.0
        if not _is_decode(plan):
            return
        expected_ms, self._last_decode_ms = min(self._last_decode_ms, result.duration_ms), result.duration_ms
        if following is None or waited_s < LEAST_WAIT_S:
            return
        if _shape(plan) == _shape(following) and _is_decode(following):
            lead_s = LEAST_LEAD_S + LEAD_OF_TURNS * self._slowest_turn_s
            self._until_s = now_s + expected_ms / 1e3 - lead_s


def _shape(plan: StepPlan) -> tuple[int, int]:
    return len(plan.sequences), plan.num_tokens


def _is_decode(plan: StepPlan) -> bool:
    """Nothing but a row for each sequence: no prefill, no encoder, no copies."""
    moves = plan.encode or plan.row_copies or plan.swap_in or plan.swap_out
    return not moves and 0 < len(plan.sequences) == plan.num_tokens
