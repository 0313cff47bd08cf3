"""A node of the prefix index, the keys under which its rows can be found, and what a search finds."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism_server.identity import Digest


@dataclass(slots=True)
class Entry:
    """A point up to which KV can be found: `rows` rows of its page, under `key`."""

    key: Digest
    rows: int
    media_keys: list[Digest] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CachedPage:
    """A node. `page` is None while only the host has it; `host_slot` is None while only the device has it."""

    parent: CachedPage | None
    page: int | None
    host_slot: int | None = None
    entries: dict[int, Entry] = field(default_factory=dict)
    children: dict[CachedPage, None] = field(default_factory=dict)
    locks: int = 0
    """Sequences that stand on it, and children that are locked. (Counting those that stand anywhere below would take
    every sequence past every page of its prompt.)"""
    named_by_step: int = 0
    """Last launched step that reads or writes the device page (or fills it: valid once that step has completed). May
    be that of a page below, which goes first anyway."""
    filled_by_step: int = 0
    """The launched step that swaps the device page in; compute that stands on it waits for its completion."""
    host_filled_by_step: int = 0
    """The launched step that writes the host slot."""
    host_named_by_step: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """What is cached of a prompt: `nodes` cover whole pages; `tail` covers `tail_rows` rows of the page after them."""

    nodes: tuple[CachedPage, ...] = ()
    tail: CachedPage | None = None
    tail_rows: int = 0

    def rows(self, page_tokens: int) -> int:
        return len(self.nodes) * page_tokens + self.tail_rows
