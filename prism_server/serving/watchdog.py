"""Notices an engine that stands still: a kernel that does not end, a thread that is stuck. Pure; no clock."""

from __future__ import annotations

CUDA_LIMIT_S = 300.0
LONGEST_LOOK_S = 1.0
"""Counted at most between two looks. They are a tenth of that apart: where more has passed, this process did not run
(it was stopped, or starved), and neither did the engine."""


def step_limit_s(asked_s: float | None, device: str) -> float:
    """`engine.step_timeout_s`, or the default for the device as PyTorch names it: none on a CPU, where one step of a
    long prompt may honestly take minutes."""
    if asked_s is not None:
        return asked_s
    return CUDA_LIMIT_S if device.startswith("cuda") else 0.0


class Watchdog:
    """Looks, some times a second, at when the engine began its present turn. `timeout_s` 0: never bites."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._turn_began_s: float | None = None
        self._looked_s = 0.0
        self._stuck_s = 0.0

    def bites(self, turn_began_s: float | None, now_s: float) -> bool:
        """Whether one and the same turn has gone on for longer than `timeout_s`, as far as this process ran."""
        if turn_began_s is None or turn_began_s != self._turn_began_s:
            self._stuck_s = 0.0
        else:
            self._stuck_s += min(now_s - self._looked_s, LONGEST_LOOK_S)
        self._turn_began_s, self._looked_s = turn_began_s, now_s
        return 0 < self._timeout_s < self._stuck_s
