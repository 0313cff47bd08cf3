"""Bookkeeping of encoder outputs: bytes, pins, eviction order. The tensors themselves live with the executor."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from prism_server.media.item import ItemKey


@dataclass(slots=True)
class _Item:
    num_bytes: int
    pins: set[int] = field(default_factory=set)
    complete: bool = False
    blocks_done: int = 0


class FeatureCache:
    """Features by item, within a capacity in bytes.

    An item is reserved before its encoding starts, complete when it ends, pinned while a sequence's rows still need it,
    and evicted least recently used first. Sequences are named by their numbers.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.evictions = 0
        self._items: dict[ItemKey, _Item] = {}
        self._unpinned: OrderedDict[ItemKey, None] = OrderedDict()
        self._dropped: list[ItemKey] = []
        self._completed: list[ItemKey] = []

    def holds(self, key: ItemKey) -> bool:
        """Whether the item's features are there (or will be when the step that is being planned reads them)."""
        item = self._items.get(key)
        return item is not None and item.complete

    def blocks_done(self, key: ItemKey) -> int | None:
        """Vision blocks already run for a reserved item; None when it is not reserved."""
        item = self._items.get(key)
        return None if item is None else item.blocks_done

    def pin(self, key: ItemKey, sequence: int) -> None:
        """The sequence needs the reserved item: it stays until everyone who pinned it has let go. Twice is once."""
        self._items[key].pins.add(sequence)
        self._unpinned.pop(key, None)

    def unpin(self, key: ItemKey, sequence: int) -> None:
        """The sequence needs the item no longer; without pins it may be evicted, as the last in the order. Nothing
        happens where the sequence has no pin, or the item is gone."""
        item = self._items.get(key)
        if item is not None and sequence in item.pins:
            item.pins.remove(sequence)
            if not item.pins:
                self._unpinned[key] = None

    def try_reserve(self, key: ItemKey, num_bytes: int, sequence: int) -> bool:
        """Make room for an item and pin it; False when pinned items leave no room."""
        free_bytes = self.capacity_bytes - self.used_bytes
        evictable_bytes = sum(self._items[other].num_bytes for other in self._unpinned) if free_bytes < num_bytes else 0
        if free_bytes + evictable_bytes < num_bytes:
            return False
        while self.capacity_bytes - self.used_bytes < num_bytes:
            self.drop(next(iter(self._unpinned)))
            self.evictions += 1
        self._items[key] = _Item(num_bytes, {sequence})
        self.used_bytes += num_bytes
        return True

    def advance(self, key: ItemKey, blocks_done: int, finished: bool) -> None:
        """A step is planned that takes the reserved item to `blocks_done` vision blocks. From `finished` on the cache
        `holds` it, and it is among the next changes."""
        item = self._items[key]
        item.blocks_done, item.complete = blocks_done, finished
        if finished:
            self._completed.append(key)

    def drop(self, key: ItemKey) -> None:
        """Forget an item, pinned or not."""
        item = self._items.pop(key)
        self._unpinned.pop(key, None)
        self.used_bytes -= item.num_bytes
        self._dropped.append(key)

    def drop_if_idle(self, key: ItemKey) -> None:
        """A half-encoded item that nobody waits for is not worth its bytes."""
        item = self._items.get(key)
        if item is not None and not item.complete and not item.pins:
            self.drop(key)

    def clear(self) -> None:
        """Forget every item that nobody pins."""
        for key in tuple(self._unpinned):
            self.drop(key)

    def take_changes(self) -> tuple[tuple[ItemKey, ...], tuple[ItemKey, ...]]:
        """Items completed and dropped since the last call."""
        changes = tuple(self._completed), tuple(self._dropped)
        self._completed, self._dropped = [], []
        return changes

    def half_encoded(self) -> list[ItemKey]:
        return [key for key, item in self._items.items() if item.blocks_done and not item.complete]

    def pinned_by(self, sequence: int) -> list[ItemKey]:
        return [key for key, item in self._items.items() if sequence in item.pins]

    def check_integrity(self) -> None:
        assert self.used_bytes == sum(item.num_bytes for item in self._items.values()) <= self.capacity_bytes
        assert set(self._unpinned) == {key for key, item in self._items.items() if not item.pins}
