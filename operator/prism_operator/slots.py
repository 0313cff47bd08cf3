"""How many rollouts run at the same time."""

from __future__ import annotations

import threading


class RolloutSlots:
    """Held by UID while a rollout moves; one that is stuck gives its slot back. Safe to use from several threads."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._holders: set[str] = set()
        self._lock = threading.Lock()

    def take(self, uid: str) -> bool:
        """True when `uid` holds one now."""
        with self._lock:
            if uid not in self._holders and len(self._holders) >= self._size:
                return False
            self._holders.add(uid)
            return True

    def release(self, uid: str) -> None:
        with self._lock:
            self._holders.discard(uid)
