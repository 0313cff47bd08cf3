"""Notices an engine that stands still: a kernel that does not end, a thread that is stuck. Pure; no clock."""

from __future__ import annotations

LONGEST_LOOK_S = 1.0
"""Counted at most between two looks. They are a tenth of that apart: where more has passed, this process did not run
(it was stopped, or starved), and neither did the engine."""


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
