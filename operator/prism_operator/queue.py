"""Keys that wait for a pass: each at most once, each handled by one worker at a time, failures with growing pauses."""

from __future__ import annotations

import asyncio
import heapq
import random
from dataclasses import dataclass

FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 60.0


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """A PrismDeployment by name."""

    namespace: str
    name: str


class DueKeys:
    """The order of passes. Pure: time comes in as an argument (seconds, any origin)."""

    def __init__(self, seed: int | None = None) -> None:
        self._due_s: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._running: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, key: Key, due_s: float) -> None:
        """An earlier time wins over a later one that is already noted."""
        if due_s < self._due_s.get(key, float("inf")):
            self._due_s[key] = due_s
            heapq.heappush(self._heap, (due_s, key))

    def take(self, now_s: float) -> Key | None:
        """A key whose time has come and that nobody works on; `done` or `failed` must follow."""
        held: list[tuple[float, Key]] = []
        found = None
        while self._heap and self._heap[0][0] <= now_s and found is None:
            due_s, key = heapq.heappop(self._heap)
            if self._due_s.get(key) != due_s:
                continue  # an earlier entry took its place
            if key in self._running:
                held.append((due_s, key))
                continue
            del self._due_s[key]
            self._running.add(key)
            found = key
        for entry in held:
            heapq.heappush(self._heap, entry)
        return found

    def done(self, key: Key) -> None:
        """The pass is over, and well."""
        self._running.discard(key)
        self._failures.pop(key, None)

    def failed(self, key: Key, now_s: float) -> float:
        """The pass is over, and not well: the key comes back. Returns the pause, seconds."""
        self._running.discard(key)
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        longest_s = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2.0 ** min(failures - 1, 16))
        pause_s = longest_s * self._random.uniform(0.5, 1.0)
        self.add(key, now_s + pause_s)
        return pause_s

    def next_due_s(self) -> float | None:
        """When the next key that nobody works on is due; None if there is none."""
        return min((due_s for key, due_s in self._due_s.items() if key not in self._running), default=None)


class KeyQueue:
    """`DueKeys` on the event loop's clock. All methods belong to that loop's thread."""

    def __init__(self) -> None:
        self._keys = DueKeys()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key, delay_s: float = 0.0) -> None:
        self._keys.add(key, self._now_s() + delay_s)
        self._changed.set()

    async def take(self) -> Key:
        """The next key, when it is due."""
        while True:
            now_s = self._now_s()
            key = self._keys.take(now_s)
            if key is not None:
                return key
            self._changed.clear()
            due_s = self._keys.next_due_s()
            timeout_s = None if due_s is None else max(due_s - now_s, 0.001)
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        self._keys.done(key)
        self._changed.set()

    def failed(self, key: Key) -> float:
        """Returns the pause before the key comes back, seconds."""
        pause_s = self._keys.failed(key, self._now_s())
        self._changed.set()
        return pause_s

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
