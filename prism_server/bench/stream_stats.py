"""What the times of streamed answers say: time to first token, time per token, longest gap, steady decoding. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Kind = Literal["cold", "hot", "stream"]
"""Pictures seen for the first time, seen before, or no pictures: a stream that only decodes."""


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One answer as its client saw it. Times are seconds of one clock; a failed request has an `error`."""

    kind: Kind
    sent_s: float
    arrivals_s: tuple[float, ...] = field(default=(), repr=False)
    """When each chunk with text came; chunks that came together have the same time."""
    num_tokens: int = 0
    """As the server counted them; several may have shared a chunk, some have no text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    def __post_init__(self) -> None:
        assert self.error or self.arrivals_s, "an answer without a token is an error"

    @property
    def first_s(self) -> float:
        return self.arrivals_s[0]

    @property
    def last_s(self) -> float:
        return self.arrivals_s[-1]

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.first_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time of a token after the first; None of a single one."""
        if self.num_tokens < 2 or len(self.arrivals_s) < 2:
            return None
        return 1e3 * (self.last_s - self.first_s) / (self.num_tokens - 1)

    def longest_gap_ms(self, begin_s: float = -math.inf, end_s: float = math.inf) -> float | None:
        """The longest wait for the next chunk among the waits that touch `begin_s` to `end_s`; None without one."""
        gaps = [b - a for a, b in pairwise(self.arrivals_s) if b >= begin_s and a <= end_s]
        return 1e3 * max(gaps) if gaps else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Iterable[float | None]) -> float | None:
    """Of the values that are there."""
    return percentile([value for value in values if value is not None], 50)


def steady_tpot_ms(streams: Sequence[StreamResult]) -> float | None:
    """Time of a decode step while every stream decodes: from the last one's first token to the first one's last.

    A chunk counts as many tokens as its stream's chunks hold on average. None if they never all decode at once.
    """
    if not streams:
        return None
    begin_s, end_s = max(s.first_s for s in streams), min(s.last_s for s in streams)
    tokens = sum(_chunks_after(s, begin_s, end_s) * s.num_tokens / len(s.arrivals_s) for s in streams)
    return 1e3 * (end_s - begin_s) * len(streams) / tokens if tokens > 0 and end_s > begin_s else None


def _chunks_after(stream: StreamResult, begin_s: float, end_s: float) -> int:
    """Chunks in the window, the first not counted: it only starts the clock."""
    return max(0, sum(begin_s <= time_s <= end_s for time_s in stream.arrivals_s) - 1)
