"""Whether pods that start get on with it: their `/startupz` is read now and then, and one that stands still is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from prism_operator.admin_client import Start
from prism_operator.pods import Pod, Trouble

LONGEST_INTERVAL_S = 15.0


class Starts:
    """What one process has seen of one deployment. `read` asks pods and leaves out those that do not answer."""

    def __init__(self, read: Callable[[Sequence[Pod]], list[Start]], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._seen: dict[str, tuple[Start, float]] = {}
        """By UID: where it was last, and since when."""
        self._due_s = float("-inf")
        self.retry_s: float | None = None
        """When to look again; None while nothing starts."""

    def judged(self, pods: Sequence[Pod], stall_s: float) -> list[Pod]:
        """The same pods; one that has answered and not moved for `stall_s` is in trouble: `StartStalled`.

        A pod that has never answered may still wait for its image: that is not ours to judge.
        """
        starting = [pod for pod in pods if pod.ip and not (pod.is_ready or pod.is_terminating or pod.trouble)]
        uids = {pod.uid for pod in starting}
        self._seen = {uid: seen for uid, seen in self._seen.items() if uid in uids}
        now_s = self._clock()
        if starting and now_s >= self._due_s:
            self._ask(starting, now_s)
            self._due_s = now_s + min(stall_s / 4, LONGEST_INTERVAL_S)
        self.retry_s = max(self._due_s - now_s, 0.0) if starting else None
        return [self._judged(pod, now_s, stall_s) for pod in pods]

    def _ask(self, starting: Sequence[Pod], now_s: float) -> None:
        for start in self._read(starting):
            before = self._seen.get(start.pod_uid)
            if before is None or before[0] != start:
                self._seen[start.pod_uid] = (start, now_s)

    def _judged(self, pod: Pod, now_s: float, stall_s: float) -> Pod:
        start, since_s = self._seen.get(pod.uid, (None, now_s))
        if start is None or start.has_started or now_s - since_s < stall_s:
            return pod
        how_far = f"{start.stage}, {start.done:,} of {start.total:,} bytes" if start.total else start.stage
        return replace(pod, trouble=Trouble("StartStalled", f"{how_far}: nothing has moved for {stall_s:g} s"))
