"""KV pages of a deployment's running pods: read when a pod is new, again when it did not answer, and now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prism_operator.admin_client import Capacity
from prism_operator.pods import Pod

LONGEST_RETRY_S = 60.0


class Measures:
    """What one process knows of one deployment. `read` asks pods and leaves out those that do not answer."""

    def __init__(
        self,
        read: Callable[[Sequence[Pod]], list[Capacity]],
        interval_s: float,
        retry_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._read = read
        self._interval_s = interval_s
        self._first_retry_s = retry_s
        self._clock = clock
        self._asked: set[str] = set()
        self._known: list[Capacity] = []
        self._num_silent = 0
        self._due_s = float("-inf")
        self.retry_s: float | None = None
        """When to come back for a pod that did not answer; None when all have."""

    def of(self, pods: Sequence[Pod]) -> list[Capacity]:
        """Of the ready pods among `pods` that have told."""
        ready = [pod for pod in pods if pod.is_ready]
        uids = {pod.uid for pod in ready}
        if not uids <= self._asked or self._clock() >= self._due_s:
            self._ask(ready)
        self._asked &= uids
        return [capacity for capacity in self._known if capacity.pod_uid in uids]

    def _ask(self, ready: Sequence[Pod]) -> None:
        self._known = self._read(ready)
        self._asked = {pod.uid for pod in ready}
        is_silent = len(self._known) < len(ready)
        self._num_silent = self._num_silent + 1 if is_silent else 0
        self.retry_s = min(self._first_retry_s * 2.0 ** (self._num_silent - 1), LONGEST_RETRY_S) if is_silent else None
        self._due_s = self._clock() + (self._interval_s if self.retry_s is None else self.retry_s)
