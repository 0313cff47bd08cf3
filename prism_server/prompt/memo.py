"""Token ids of text that was seen before: a bounded table, shared by the threads that encode prompts."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

ENTRY_OVERHEAD_BYTES = 256
"""The dictionary's slot, the array's header and the key's own object, roughly."""


class TextMemo:
    """Text run -> int32 ids, least recently used out first, at most `capacity_bytes`. Safe from any thread."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes must not be negative: {capacity_bytes}")
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._ids: OrderedDict[str, npt.NDArray[np.int32]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._ids)

    def get(self, text: str) -> npt.NDArray[np.int32] | None:
        """The ids (read-only) or None."""
        with self._lock:
            ids = self._ids.get(text)
            if ids is None:
                self.misses += 1
                return None
            self.hits += 1
            self._ids.move_to_end(text)
            return ids

    def put(self, text: str, ids: npt.NDArray[np.int32]) -> None:
        """Remembers `ids`, which nobody may write to any more. An entry larger than the whole table is not kept."""
        ids.setflags(write=False)
        size = _entry_bytes(text, ids)
        if size > self.capacity_bytes:
            return
        with self._lock:
            if text in self._ids:
                return
            self._ids[text] = ids
            self.used_bytes += size
            while self.used_bytes > self.capacity_bytes:
                old_text, old_ids = self._ids.popitem(last=False)
                self.used_bytes -= _entry_bytes(old_text, old_ids)
                self.evictions += 1


def _entry_bytes(text: str, ids: npt.NDArray[np.int32]) -> int:
    return sys.getsizeof(text) + ids.nbytes + ENTRY_OVERHEAD_BYTES
