"""How loaded each pod is: what waits there, and how much of the recent work it got."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from prism_server.identity import Digest

FADING_S = 10.0
"""Work counts for its pod's share of the load for about this long."""
HEAT_FADING_S = 60.0
"""Requests count for their key's heat for about this long: one in a hundred must stand out from chance."""
LARGEST_EXPONENT = 300.0
OLDEST_REPORT_S = 60.0
"""Reports that were asked for longer ago do not come: polls have time-outs."""


class FadingClock:
    """Scales for sums that fade: instead of shrinking every sum, new entries are made larger (forward decay)."""

    def __init__(self, fading_s: float) -> None:
        self._fading_s = fading_s
        self._origin_s: float | None = None

    def scale(self, now_s: float) -> float:
        """What one unit of now is entered as, or what a sum is divided by to be in units of now."""
        if self._origin_s is None:
            return 1.0
        return math.exp(min((now_s - self._origin_s) / self._fading_s, LARGEST_EXPONENT))

    def rebase(self, now_s: float) -> float:
        """To be called before entries: keeps scales within bounds. Returns the factor for all sums, mostly 1."""
        if self._origin_s is None:
            self._origin_s = now_s
        exponent = (now_s - self._origin_s) / self._fading_s
        if exponent < LARGEST_EXPONENT:
            return 1.0
        self._origin_s = now_s
        return math.exp(-exponent)


class Heat:
    """How much of the recent requests ask for each key. Bounded: when there are too many keys, the coldest leave."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._clock = FadingClock(HEAT_FADING_S)
        self._counts: dict[Digest, float] = {}
        self._total = 0.0

    def add(self, key: Digest, now_s: float) -> None:
        """One request."""
        factor = self._clock.rebase(now_s)
        if factor != 1.0:
            self._total *= factor
            self._counts = {key: count * factor for key, count in self._counts.items()}
        scale = self._clock.scale(now_s)
        self._total += scale
        self._counts[key] = self._counts.get(key, 0.0) + scale
        if len(self._counts) > self._max_keys:
            hottest = sorted(self._counts.items(), key=lambda item: item[1], reverse=True)
            self._counts = dict(hottest[: self._max_keys // 2])

    def share(self, key: Digest) -> float:
        """Of all recent requests that have a key, 0 to 1."""
        return self._counts.get(key, 0.0) / self._total if self._total else 0.0


@dataclass(slots=True)
class Backlog:
    """When a pod will have done what it was given: its reports, and what was sent since."""

    busy_until_s: float = float("-inf")
    _recent: deque[tuple[float, float]] = field(default_factory=deque)

    def wait_ms(self, now_s: float) -> float:
        return max(0.0, (self.busy_until_s - now_s) * 1e3)

    def add(self, work_ms: float, now_s: float) -> None:
        """A request is sent; or taken back, with what it would still have cost below 0."""
        self.busy_until_s = max(self.busy_until_s, now_s) + work_ms / 1e3
        self._recent.append((now_s, work_ms))
        while self._recent[0][0] < now_s - OLDEST_REPORT_S:
            self._recent.popleft()

    def report(self, reported_ms: float | None, asked_s: float, now_s: float) -> None:
        """The pod's own word, asked for at `asked_s`; requests sent since are not in it. None: it does not say."""
        while self._recent and self._recent[0][0] < asked_s:
            self._recent.popleft()
        if reported_ms is not None:
            later_ms = sum(work_ms for _, work_ms in self._recent)
            self.busy_until_s = asked_s + (reported_ms + later_ms) / 1e3
