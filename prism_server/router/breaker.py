"""A pod that keeps failing is left alone for a while, then tried with one request; and whose fault a failure is.

Pure: times come in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Breaker:
    """Of one pod. Opens after `failures_to_open` failures in a row, for `open_s`; then one request probes it."""

    failures_to_open: int
    open_s: float
    _failures: int = 0
    _failed_bodies: set[int] = field(default_factory=set)
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
        self._failed_bodies.clear()

    def failed(self, now_s: float, body: int | None = None) -> None:
        """`body` stands for the body of a request that may itself be at fault: of a row it counts once."""
        self._probe_until_s = 0.0
        if self.is_closed and body not in self._failed_bodies:
            self._failures += 1
            if body is not None:
                self._failed_bodies.add(body)
        if not self.is_closed:
            self._open_until_s = now_s + self.open_s


class Blame:
    """Of one request: which of its failures are the pods' fault, and which may be its own doing.

    One after the request has reached the pod is in doubt. It is the pod's fault once another pod answers the same
    request. A request that fails at several pods is held against none of them, so that a client whose requests make
    pods fail cannot take every pod away from all others.
    """

    def __init__(self) -> None:
        self._in_doubt: list[Breaker] = []

    def failed(self, breaker: Breaker, now_s: float, is_certain: bool) -> None:
        """A pod did not answer. `is_certain`: whatever was asked, it would not have."""
        if is_certain:
            breaker.failed(now_s)
        else:
            self._in_doubt.append(breaker)

    def answered(self, now_s: float) -> None:
        """A pod has answered: there was nothing wrong with the request."""
        for breaker in self._in_doubt:
            breaker.failed(now_s)
        self._in_doubt.clear()

    def nobody_else(self, now_s: float, checksum: Callable[[], int]) -> None:
        """No other pod is to be asked. If there was one only, it is blamed, for every body once."""
        if len(self._in_doubt) == 1:
            self._in_doubt[0].failed(now_s, checksum())
        self._in_doubt.clear()
