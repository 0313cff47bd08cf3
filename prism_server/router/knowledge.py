"""Which pod holds which key: as reported, and as expected of requests under way.

Pods stand in slots (small numbers), so that "who holds this key" is one look-up that gives a set as bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prism_server.identity import Digest


def slots_of(bits: int) -> Iterator[int]:
    """The slots whose bits are set, lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class KeyIndex:
    """Keys and their holders. Of one slot at most `max_keys_per_slot` are kept; the oldest leave first."""

    def __init__(self, max_keys_per_slot: int) -> None:
        if max_keys_per_slot < 1:
            raise ValueError(f"an index needs room for at least one key of a pod, not {max_keys_per_slot}")
        self._max_keys = max_keys_per_slot
        self._holders: dict[Digest, int] = {}
        self._keys: dict[int, dict[Digest, None]] = {}
        self.dropped = 0

    def __len__(self) -> int:
        """Keys held by anyone."""
        return len(self._holders)

    def num_keys(self, slot: int) -> int:
        return len(self._keys.get(slot, ()))

    def holders(self, key: Digest) -> int:
        """Bits of the slots that hold the key."""
        return self._holders.get(key, 0)

    def add(self, slot: int, keys: Iterable[Digest]) -> None:
        """Keys become the slot's youngest."""
        held, bit = self._keys.setdefault(slot, {}), 1 << slot
        for key in keys:
            held.pop(key, None)
            held[key] = None
            self._holders[key] = self._holders.get(key, 0) | bit
        while len(held) > self._max_keys:
            self._remove(held, next(iter(held)), bit)
            self.dropped += 1

    def remove(self, slot: int, keys: Iterable[Digest]) -> None:
        """Keys that the slot does not hold are passed over."""
        held, bit = self._keys.get(slot, {}), 1 << slot
        for key in keys:
            if key in held:
                self._remove(held, key, bit)

    def clear(self, slot: int) -> None:
        """The slot holds nothing any more."""
        bit = 1 << slot
        for key in self._keys.pop(slot, {}):
            self._take_bit(key, bit)

    def _remove(self, held: dict[Digest, None], key: Digest, bit: int) -> None:
        del held[key]
        self._take_bit(key, bit)

    def _take_bit(self, key: Digest, bit: int) -> None:
        rest = self._holders[key] & ~bit
        if rest:
            self._holders[key] = rest
        else:
            del self._holders[key]


@dataclass(slots=True)
class _Expectation:
    """Requests under way that will make the key, and when the last of them had made it."""

    num_requests: int = 0
    made_s: float = float("-inf")


@dataclass
class ExpectedKeys:
    """Keys that requests under way will leave at their pods.

    A key is expected while such a request waits for its first byte, and after that until the pod has had the time to
    report it (`settle`): reported, it stands in the other index; not reported, it is not there.
    """

    _expected: dict[tuple[int, Digest], _Expectation] = field(default_factory=dict)
    _holders: KeyIndex = field(default_factory=lambda: KeyIndex(1 << 20))
    _made: dict[int, deque[tuple[float, Digest]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._expected)

    def holders(self, key: Digest) -> int:
        """Bits of the slots at which the key is expected."""
        return self._holders.holders(key)

    def begin(self, slot: int, keys: Iterable[Digest]) -> None:
        """A request that will make `keys` goes to the slot's pod."""
        for key in keys:
            entry = self._expected.get((slot, key))
            if entry is None:
                entry = self._expected[slot, key] = _Expectation()
                self._holders.add(slot, (key,))
            entry.num_requests += 1

    def made(self, slot: int, keys: Iterable[Digest], now_s: float) -> None:
        """The request has its first byte: the keys are there, unless they were thrown out at once."""
        made = self._made.setdefault(slot, deque())
        for key in keys:
            entry = self._expected.get((slot, key))
            if entry is not None:
                entry.num_requests -= 1
                entry.made_s = now_s
                made.append((now_s, key))

    def given_up(self, slot: int, keys: Iterable[Digest]) -> None:
        """The request ended before its first byte. What an earlier one made and nobody reported yet goes with it."""
        for key in keys:
            entry = self._expected.get((slot, key))
            if entry is not None:
                entry.num_requests -= 1
                if entry.num_requests == 0:
                    self._forget(slot, key)

    def settle(self, slot: int, before_s: float) -> None:
        """What was made before `before_s` is known by reports now; times must not go back."""
        made = self._made.get(slot)
        while made and made[0][0] <= before_s:
            _, key = made.popleft()
            entry = self._expected.get((slot, key))
            if entry is not None and entry.num_requests == 0 and entry.made_s <= before_s:
                self._forget(slot, key)

    def clear(self, slot: int) -> None:
        """The pod has lost everything."""
        for place in [place for place in self._expected if place[0] == slot]:
            del self._expected[place]
        self._holders.clear(slot)
        self._made.pop(slot, None)

    def _forget(self, slot: int, key: Digest) -> None:
        del self._expected[slot, key]
        self._holders.remove(slot, (key,))
