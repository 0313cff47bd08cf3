"""A pod that keeps failing is left alone for a while, then tried with one request. Pure: times come in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Breaker:
    """Of one pod. Opens after `failures_to_open` failures in a row, for `open_s`; then one request probes it."""

    failures_to_open: int
    open_s: float
    _failures: int = 0
    _open_until_s: float = 0.0
    _probe_until_s: float = 0.0

    @property
    def is_closed(self) -> bool:
        return self._failures < self.failures_to_open

    def allows(self, now_s: float) -> bool:
        """Whether a request may go there now."""
        return self.is_closed or now_s >= max(self._open_until_s, self._probe_until_s)

    def sent(self, now_s: float) -> None:
        """A request goes there. If it is the probe of an open breaker, others wait for its end, or for `open_s`."""
        if not self.is_closed:
            self._probe_until_s = now_s + self.open_s

    def succeeded(self) -> None:
        self._failures, self._open_until_s, self._probe_until_s = 0, 0.0, 0.0

    def failed(self, now_s: float) -> None:
        self._failures += 1
        self._probe_until_s = 0.0
        if not self.is_closed:
            self._open_until_s = now_s + self.open_s
