"""What this server's caches hold, for routers: a journal of changes with a cursor, and snapshots.

Readers present (epoch, cursor) and get what changed since. A reader with another epoch, an unknown cursor or one older
than the journal reaches gets a snapshot instead. The epoch changes at every start and reset.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from prism_server.engine.messages import CacheChanged
from prism_server.identity import Digest, LinkContent

JOURNAL_KEYS = 65_536
"""Key changes remembered; a reader further behind gets a snapshot, which is then the shorter answer as well."""
MAX_LINKS = 4096
"""Links remembered for readers that come later; those that follow have heard of the others already."""


@dataclass(frozen=True, slots=True)
class CacheNews:
    """The answer to one poll. For a snapshot, `*_added` is all that is held."""

    epoch: str
    cursor: int
    snapshot: bool
    chains_added: tuple[Digest, ...] = ()
    chains_evicted: tuple[Digest, ...] = ()
    features_added: tuple[Digest, ...] = ()
    features_evicted: tuple[Digest, ...] = ()
    links: tuple[LinkContent, ...] = ()


@dataclass
class _Held:
    """A set of keys and the net effect of changes on it."""

    keys: set[Digest] = field(default_factory=set)

    def apply(self, added: Iterable[Digest], evicted: Iterable[Digest]) -> None:
        self.keys.difference_update(evicted)
        self.keys.update(added)


class CacheJournal:
    """Written and read on the event loop only."""

    def __init__(self, max_keys: int = JOURNAL_KEYS, max_links: int = MAX_LINKS) -> None:
        self._max_keys = max_keys
        self._max_links = max_links
        self._links: dict[Digest, tuple[int, Digest]] = {}
        """Position and content, in order of the positions."""
        self._changes: deque[tuple[int, CacheChanged]] = deque()
        self._num_keys = 0
        self._cursor = 0
        self._oldest = 0
        self.reset()

    @property
    def epoch(self) -> str:
        return self._epoch

    def reset(self) -> None:
        """Everything is forgotten, under a new epoch: nobody's cursor holds any more. Links lead where they led."""
        self._epoch = secrets.token_hex(16)
        self._chains, self._features = _Held(), _Held()
        self._changes.clear()
        self._num_keys = 0
        self._oldest = self._cursor

    def record(self, change: CacheChanged) -> None:
        """Within one change evictions come first: a key that is in both lists is held afterwards."""
        self._chains.apply(change.chains_added, change.chains_evicted)
        self._features.apply(change.features_added, change.features_evicted)
        self._cursor += 1
        self._changes.append((self._cursor, change))
        self._num_keys += _size(change)
        while self._num_keys > self._max_keys:
            self._oldest, dropped = self._changes.popleft()
            self._num_keys -= _size(dropped)

    def record_link(self, url_digest: Digest, content_id: Digest) -> None:
        """A link has been fetched; only what is new about it counts."""
        known = self._links.get(url_digest)
        if known is not None and known[1] == content_id:
            return
        self._links.pop(url_digest, None)
        self._cursor += 1
        self._links[url_digest] = (self._cursor, content_id)
        if len(self._links) > self._max_links:
            del self._links[next(iter(self._links))]

    def since(self, epoch: str | None, cursor: int | None) -> CacheNews:
        """What a reader at (epoch, cursor) does not know yet."""
        if epoch != self._epoch or cursor is None or not self._oldest <= cursor <= self._cursor:
            return CacheNews(
                self._epoch,
                self._cursor,
                True,
                chains_added=tuple(self._chains.keys),
                features_added=tuple(self._features.keys),
                links=self._links_after(0),
            )
        later = [change for at, change in self._changes if at > cursor]
        chains = _net((c.chains_added, c.chains_evicted) for c in later)
        features = _net((c.features_added, c.features_evicted) for c in later)
        return CacheNews(self._epoch, self._cursor, False, *chains, *features, self._links_after(cursor))

    def _links_after(self, cursor: int) -> tuple[LinkContent, ...]:
        newest_first = takewhile(lambda entry: entry[1][0] > cursor, reversed(self._links.items()))
        return tuple(LinkContent(link, content) for link, (_, content) in newest_first)[::-1]


def _size(change: CacheChanged) -> int:
    """Keys named, at least one, so that empty changes are bounded too."""
    return 1 + sum(
        map(len, (change.chains_added, change.chains_evicted, change.features_added, change.features_evicted))
    )


def _net(
    changes: Iterable[tuple[tuple[Digest, ...], tuple[Digest, ...]]],
) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
    """(added, evicted) after all of `changes`: the last word on each key."""
    is_held: dict[Digest, bool] = {}
    for added, evicted in changes:
        is_held.update(dict.fromkeys(evicted, False))
        is_held.update(dict.fromkeys(added, True))
    return tuple(k for k, held in is_held.items() if held), tuple(k for k, held in is_held.items() if not held)
