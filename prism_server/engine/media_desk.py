"""Which items the workers are preparing, which are staged at the executor, and for whom."""

from __future__ import annotations

from dataclasses import dataclass

from prism_server.engine.sequence import Sequence
from prism_server.media.item import ItemFacts, ItemKey, MediaItem


@dataclass(frozen=True, slots=True)
class MediaRequest:
    """The owner asks a worker for an item's patches."""

    item: MediaItem
    facts: ItemFacts


class MediaDesk:
    """Patches stay staged from their arrival until the item is encoded, or until no sequence needs them."""

    def __init__(self) -> None:
        self._pending: dict[ItemKey, list[Sequence]] = {}
        self._staged: dict[ItemKey, set[int]] = {}
        self._requests: list[MediaRequest] = []
        self._abandoned: list[ItemKey] = []
        self._dropped: list[ItemKey] = []

    @property
    def num_staged(self) -> int:
        return len(self._staged)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def is_staged(self, key: ItemKey) -> bool:
        return key in self._staged

    def want(self, sequence: Sequence, facts: ItemFacts) -> None:
        """The sequence needs the item's pixels: staged ones are held for it, others are asked for (once)."""
        key = facts.key
        if key in sequence.wanted:
            return
        if key in self._staged:
            self._staged[key].add(sequence.number)
            sequence.holds_staged[key] = None
            return
        sequence.wanted[key] = None
        if key in self._pending:
            self._pending[key].append(sequence)
            return
        self._pending[key] = [sequence]
        index = next(span.media_index for span in sequence.spans if span.facts.key == key)
        self._requests.append(MediaRequest(sequence.request.media[index], facts))

    def arrived(self, key: ItemKey) -> list[Sequence]:
        """The executor has the item's patches. Returns those that waited; when nobody does, they are dropped."""
        waiting = self._pending.pop(key, [])
        for sequence in waiting:
            sequence.wanted.pop(key, None)
            sequence.holds_staged[key] = None
        if key in self._dropped:
            self._dropped.remove(key)  # the drop has not been sent yet; it would hit what has just arrived
        users = self._staged.setdefault(key, set())
        users.update(sequence.number for sequence in waiting)
        if not users:
            self._drop(key)
        return waiting

    def failed(self, key: ItemKey) -> list[Sequence]:
        """The item cannot be prepared. Returns those that asked; nothing of the failure is kept."""
        return self._pending.pop(key, [])

    def encoded(self, key: ItemKey) -> None:
        """The plan that is being built finishes the item: the executor lets its patches go by itself."""
        self._staged.pop(key, None)

    def leave(self, sequence: Sequence) -> list[ItemKey]:
        """The sequence left the device; what only it needed is dropped. Returns the items whose pixels were.

        What is being prepared goes on: it may come back for it (`forget` when it does not).
        """
        dropped = []
        for key in sequence.wanted:
            if key in self._pending:
                self._pending[key].remove(sequence)
        sequence.wanted.clear()
        for key in sequence.holds_staged:
            users = self._staged.get(key, set())
            users.discard(sequence.number)
            if key in self._staged and not users:
                self._drop(key)
                dropped.append(key)
        sequence.holds_staged.clear()
        return dropped

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended: what is being prepared of its media, and nobody else waits for, is abandoned."""
        for span in sequence.spans:
            if self._pending.get(span.facts.key) == []:
                self._abandon(span.facts.key)

    def take_requests(self) -> list[MediaRequest]:
        requests, self._requests = self._requests, []
        return requests

    def take_abandoned(self) -> list[ItemKey]:
        """Items that were asked for and that nobody waits for any more; to be told before the new requests."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def take_dropped(self) -> tuple[ItemKey, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _abandon(self, key: ItemKey) -> None:
        del self._pending[key]
        queued = next((request for request in self._requests if request.facts.key == key), None)
        if queued is None:
            self._abandoned.append(key)
        else:
            self._requests.remove(queued)

    def _drop(self, key: ItemKey) -> None:
        del self._staged[key]
        self._dropped.append(key)
