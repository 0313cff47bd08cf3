"""What links led to: bytes kept once by their content, however many links lead there, within a capacity."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

MAX_LINKS = 16_384


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of an answer and their SHA-256, by which equal ones are found."""

    data: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """What a link led to, and how to find out whether it still does.

    `source`: the link after all redirects, to which `etag` and `last_modified` belong; `fresh_until_s`: before it,
    nobody needs to be asked (monotonic clock).
    """

    body: Body
    source: str
    etag: bytes | None
    last_modified: bytes | None
    fresh_until_s: float


@dataclass(frozen=True, slots=True)
class LinkCacheStats:
    """`evictions` only grows; the others are gauges."""

    evictions: int
    links_now: int
    bytes_now: int
    capacity_bytes: int


@dataclass(slots=True)
class _Held:
    body: Body
    num_links: int = 0


class LinkCache:
    """Link -> Kept, least recently used out first. One thread's, the event loop's. Capacity 0 keeps nothing."""

    def __init__(self, capacity_bytes: int, max_links: int = MAX_LINKS) -> None:
        if capacity_bytes < 0 or max_links < 1:
            raise ValueError(f"a cache of {max_links} links cannot have {capacity_bytes} bytes")
        self._capacity_bytes = capacity_bytes
        self._max_links = max_links
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._held: dict[bytes, _Held] = {}
        self._bytes_now = self._evictions = 0

    def get(self, link: str) -> Kept | None:
        """Counted as used now."""
        kept = self._kept.get(link)
        if kept is not None:
            self._kept.move_to_end(link)
        return kept

    def put(self, link: str, kept: Kept) -> None:
        """Takes the place of what was kept for the link. Larger than the capacity: nothing is kept."""
        self.drop(link)
        if len(kept.body.data) > self._capacity_bytes:
            return
        held = self._held.get(kept.body.digest)
        if held is None:
            held = self._held[kept.body.digest] = _Held(kept.body)
            self._bytes_now += len(kept.body.data)
        held.num_links += 1
        self._kept[link] = replace(kept, body=held.body)
        while self._bytes_now > self._capacity_bytes or len(self._kept) > self._max_links:
            self.drop(next(iter(self._kept)))
            self._evictions += 1

    def drop(self, link: str) -> None:
        """Forgets the link; its bytes go with the last link to them."""
        kept = self._kept.pop(link, None)
        if kept is None:
            return
        held = self._held[kept.body.digest]
        held.num_links -= 1
        if not held.num_links:
            del self._held[kept.body.digest]
            self._bytes_now -= len(held.body.data)

    def stats(self) -> LinkCacheStats:
        return LinkCacheStats(self._evictions, len(self._kept), self._bytes_now, self._capacity_bytes)
