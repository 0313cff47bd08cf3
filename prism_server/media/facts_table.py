"""What is known about media seen before: small, so that it outlives every cache of pixels."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from prism_server.media.item import ItemFacts, ItemKey


@dataclass(frozen=True, slots=True)
class FactsStats:
    """Counters only grow; `items_now` is a gauge."""

    hits: int
    misses: int
    evictions: int
    items_now: int


class FactsTable:
    """ItemKey -> ItemFacts, the least recently used leaving first. Any thread may call it.

    The capacity counts pictures; a clip takes the room of as many as its list of frames is long (`num_shares`).
    """

    def __init__(self, capacity_items: int) -> None:
        if capacity_items < 1:
            raise ValueError(f"a facts table needs room for at least one item, not {capacity_items}")
        self._capacity_items = capacity_items
        self._facts: OrderedDict[ItemKey, ItemFacts] = OrderedDict()
        self._lock = threading.Lock()
        self._hits = self._misses = self._evictions = self._shares = 0

    def get(self, key: ItemKey) -> ItemFacts | None:
        """The facts, counted as used now; None for an unknown item."""
        with self._lock:
            facts = self._facts.get(key)
            if facts is None:
                self._misses += 1
                return None
            self._hits += 1
            self._facts.move_to_end(key)
            return facts

    def put(self, facts: ItemFacts) -> None:
        """Remembers `facts` under their own key."""
        with self._lock:
            replaced = self._facts.pop(facts.key, None)
            self._facts[facts.key] = facts
            self._shares += facts.num_shares - (replaced.num_shares if replaced else 0)
            while self._shares > self._capacity_items and len(self._facts) > 1:
                _, evicted = self._facts.popitem(last=False)
                self._shares -= evicted.num_shares
                self._evictions += 1

    def stats(self) -> FactsStats:
        with self._lock:
            return FactsStats(self._hits, self._misses, self._evictions, len(self._facts))
