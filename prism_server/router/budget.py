"""How many requests may be tried a second time: a share of all, so that a fault does not multiply the load."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RetryBudget:
    """A token bucket: each request puts `share` of a retry in, up to `most`; it starts full."""

    share: float
    most: float
    _held: float = -1.0

    def __post_init__(self) -> None:
        self._held = self.most

    def request(self) -> None:
        """A request has come, for its first try."""
        self._held = min(self.most, self._held + self.share)

    def try_retry(self) -> bool:
        """Whether one more try is allowed now; it is then counted."""
        if self._held < 1.0:
            return False
        self._held -= 1.0
        return True
