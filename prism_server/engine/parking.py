"""Work in flight: which chain keys are being computed, by whom, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterable

from prism_server.engine.sequence import Sequence
from prism_server.identity import Digest


class InFlightKeys:
    """Single flight for prefill. A sequence *leads* the keys it computes; others *park* on a key until it is published,
    or until its leader leaves; then one of them leads on."""

    def __init__(self) -> None:
        self._leaders: dict[Digest, Sequence] = {}
        self._parked: dict[Digest, list[Sequence]] = {}

    @property
    def num_parked(self) -> int:
        return sum(len(sequences) for sequences in self._parked.values())

    def is_led(self, key: Digest) -> bool:
        """Whether a sequence computes the key."""
        return key in self._leaders

    def awaited_rows(self) -> dict[Sequence, int]:
        """Of every leader on whose keys somebody is parked: the rows up to the first of those keys."""
        awaited: dict[Sequence, int] = {}
        for key, sequences in self._parked.items():
            leader, rows = self._leaders[key], sequences[0].parked_rows
            awaited[leader] = min(rows, awaited.get(leader, rows))
        return awaited

    def lead(self, sequence: Sequence, keys: Iterable[Digest]) -> None:
        """The sequence computes these keys from now, those aside that another leads already; `release` ends it."""
        for key in keys:
            if key not in self._leaders:
                self._leaders[key] = sequence
                sequence.leads.append(key)

    def park(self, sequence: Sequence, key: Digest, rows: int) -> None:
        """The sequence, parked on nothing, waits for a key that somebody leads: that of its first `rows` rows."""
        sequence.parked_on, sequence.parked_rows = key, rows
        self._parked.setdefault(key, []).append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """A parked sequence is cancelled."""
        key = sequence.parked_on
        if key is None:
            return
        sequence.parked_on = None
        others = self._parked[key]
        others.remove(sequence)
        if not others:
            del self._parked[key]

    def published(self, key: Digest) -> list[Sequence]:
        """The key can be found now. Returns those that waited for it."""
        self._leaders.pop(key, None)
        return self._wake(key)

    def release(self, sequence: Sequence) -> list[Sequence]:
        """The sequence computes no more. Returns those that waited for what it had not published."""
        woken: list[Sequence] = []
        for key in sequence.leads:
            if self._leaders.get(key) is sequence:
                del self._leaders[key]
                woken += self._wake(key)
        sequence.leads.clear()
        return woken

    def _wake(self, key: Digest) -> list[Sequence]:
        woken = self._parked.pop(key, [])
        for sequence in woken:
            sequence.parked_on = None
        return woken

    def check_integrity(self) -> None:
        for key, sequences in self._parked.items():
            assert key in self._leaders, "sequences wait for a key that nobody computes"
            assert all(sequence.parked_on == key for sequence in sequences)
