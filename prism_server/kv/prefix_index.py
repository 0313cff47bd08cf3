"""The prefix index: which computed KV can be found again, by content, and in which order it may be forgotten.

A tree of cached pages. A node is one physical page (on the device, on the host, or both) with the entries that end in
it: the full page's key, and boundary keys of rows below it. A child's key covers its parent's, so what is reachable is
always closed under "parent of". Everything that a live sequence stands on is locked, from its node up to the root;
unlocked nodes lie in least-recently-used order with children before their parents, so its head is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

from prism_server.identity import Digest
from prism_server.kv.cached_page import CachedPage, Entry, Match
from prism_server.kv.pool import PagePool

MAX_MEDIA_KEYS = 4
"""Requests that spell the same tokens differently have other media-chain keys; an entry keeps the first few."""


class PrefixIndex:
    """Owns one reference on the device page, and one on the host slot, of every node. For the owner thread only."""

    def __init__(self, pool: PagePool, host: PagePool, page_tokens: int, enabled: bool = True) -> None:
        self._pool, self._host = pool, host
        self._page_tokens = page_tokens
        self.enabled = enabled
        self._by_key: dict[Digest, tuple[CachedPage, Entry]] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._device_lru: OrderedDict[CachedPage, None] = OrderedDict()
        self._host_lru: OrderedDict[CachedPage, None] = OrderedDict()
        self._chains_added: list[Digest] = []
        self._chains_evicted: list[Digest] = []
        self.evicted_pages = 0

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_evictable(self) -> int:
        """Device pages that only unlocked nodes reference. Nothing else holds an unlocked node's page."""
        return len(self._device_lru)

    def __contains__(self, key: Digest) -> bool:
        return key in self._by_key

    def nodes(self) -> Iterator[CachedPage]:
        seen = set[int]()
        for node, _ in self._by_key.values():
            if id(node) not in seen:
                seen.add(id(node))
                yield node

    def match(self, page_keys: Iterable[Digest], boundaries: Iterable[tuple[int, Digest]], limit: int) -> Match:
        """The longest cached prefix of at most `limit` rows. `boundaries`: (rows, key) in any order."""
        nodes: list[CachedPage] = []
        for key in page_keys:
            found = self._by_key.get(key)
            if found is None or len(nodes) * self._page_tokens >= limit:
                break
            nodes.append(found[0])
        full_rows = len(nodes) * self._page_tokens
        if full_rows > limit:  # the last page is only used up to the limit: its rows are copied
            return Match(tuple(nodes[:-1]), nodes[-1], limit - (full_rows - self._page_tokens))
        best: tuple[int, CachedPage] | None = None
        for rows, key in boundaries:
            inside = min(rows, limit) - full_rows
            if inside > 0 and rows - full_rows < self._page_tokens and (best is None or inside > best[0]):
                found = self._by_key.get(key)
                if found is not None:
                    best = inside, found[0]
        if best is None:
            return Match(tuple(nodes))
        return Match(tuple(nodes), best[1], best[0])

    # -- holding -----------------------------------------------------------------------------------------------------

    def lock_path(self, node: CachedPage | None) -> None:
        """A sequence stands on `node` and so on all above it: none of them may be forgotten."""
        while node is not None:
            node.locks += 1
            if node.locks > 1:
                return  # all above are locked through it
            self._device_lru.pop(node, None)
            self._host_lru.pop(node, None)
            node = node.parent

    def unlock_path(self, node: CachedPage | None, named_by_step: int) -> None:
        """The sequence is gone; `named_by_step` is the last launched step that names its pages."""
        while node is not None:
            node.locks -= 1
            node.named_by_step = named_by_step = max(node.named_by_step, named_by_step)
            if node.locks > 0:
                return  # who unlocks it takes the step further up
            self._enter_lru(node)
            node = node.parent

    def move_lock(self, old: CachedPage | None, new: CachedPage) -> None:
        """A sequence that stood on `old` stands on `new`. `old` may have been forgotten for `new` just now."""
        self.lock_path(new)
        self.unlock_path(old, named_by_step=0)

    def _enter_lru(self, node: CachedPage) -> None:
        if node.page is not None:
            self._device_lru[node] = None
        if node.host_slot is not None:
            self._host_lru[node] = None

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(
        self, parent: CachedPage | None, key: Digest, page: int, rows: int, media_key: Digest | None = None
    ) -> CachedPage | None:
        """Rows [0, rows) of `page` are computed under `key`, after `parent` (locked by the caller).

        Returns the node that the sequence stands on from now: the page's own, or the one that held the full page's key
        before (then the page's boundary entries move there). None when it stays where it is: the index is off, or
        another node has the boundary.
        """
        if not self.enabled:
            return None
        own, found = self._by_page.get(page), self._by_key.get(key)
        if found is None:
            node = own if own is not None else self._new_node(parent, page)
            self._enter(node, Entry(key, rows))
        else:
            node = found[0]
            if rows == self._page_tokens and own is not None and own is not node:
                self._merge(own, node)
            if node.page is None and page not in self._by_page and rows == max(node.entries):
                self._adopt(node, page)
        self.note_media_key(key, media_key)
        return node if node.page == page or rows == self._page_tokens else None

    def note_media_key(self, key: Digest, media_key: Digest | None) -> None:
        """The entry `key`, if it is there, is also what `media_key` names."""
        found = self._by_key.get(key)
        if found is None or media_key is None:
            return
        held = found[1].media_keys
        if media_key not in held and len(held) < MAX_MEDIA_KEYS:
            held.append(media_key)
            self._chains_added.append(media_key)

    def _new_node(self, parent: CachedPage | None, page: int) -> CachedPage:
        node = CachedPage(parent, page)
        self._pool.retain(page)
        self._by_page[page] = node
        if parent is not None:
            parent.children[node] = None
        self._enter_lru(node)
        return node

    def _enter(self, node: CachedPage, entry: Entry) -> None:
        if node.host_slot is not None and entry.rows > max(node.entries):
            self.drop_host_slot(node)  # the copy was made before these rows were computed
        node.entries[entry.rows] = entry
        self._by_key[entry.key] = (node, entry)

    def _merge(self, source: CachedPage, target: CachedPage) -> None:
        """`source`'s page was found to be a second copy of `target`: only `target` stays."""
        for entry in source.entries.values():
            if entry.rows not in target.entries:
                self._enter(target, entry)
        source.entries.clear()
        self._forget(source)

    def _adopt(self, node: CachedPage, page: int) -> None:
        """A node that only the host held was computed again: the sequence's page becomes its device page."""
        self._pool.retain(page)
        node.page = page
        self._by_page[page] = node
        if node.locks == 0:
            self._device_lru[node] = None

    # -- forgetting --------------------------------------------------------------------------------------------------

    def reclaim(self, num_pages: int) -> int:
        """Free up to `num_pages` device pages, coldest first; stops at one that a launched step still names."""
        freed = 0
        while freed < num_pages and self._device_lru:
            node = next(iter(self._device_lru))
            if node.named_by_step > self._pool.completed_step:
                break
            self._drop_device_page(node)
            freed += 1
        return freed

    def clear(self) -> None:
        """Forget every unlocked node, on the device and on the host."""
        while self._device_lru:
            self._drop_subtree(next(iter(self._device_lru)))
        while self._host_lru:
            self._drop_subtree(next(iter(self._host_lru)))

    def take_events(self) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
        """Media-chain keys added and evicted since the last call."""
        events = tuple(self._chains_added), tuple(self._chains_evicted)
        self._chains_added, self._chains_evicted = [], []
        return events

    def _drop_device_page(self, node: CachedPage) -> None:
        if node.host_slot is None:
            self._drop_subtree(node)
            return
        page = self._detach_device(node)
        self._pool.release(page, node.named_by_step)
        self.evicted_pages += 1

    def _detach_device(self, node: CachedPage) -> int:
        page = node.page
        if page is None:
            raise AssertionError("the node has no device page")
        node.page = None
        del self._by_page[page]
        self._device_lru.pop(node, None)
        return page

    def _drop_subtree(self, root: CachedPage) -> None:
        order = [root]
        for node in order:
            order.extend(node.children)
        for node in reversed(order):
            self._forget(node)

    def _forget(self, node: CachedPage) -> None:
        """Take one childless node out of the tree and give back what it holds."""
        for entry in node.entries.values():
            del self._by_key[entry.key]
            self._chains_evicted.extend(entry.media_keys)
        node.entries.clear()
        if node.page is not None:
            page = self._detach_device(node)
            self._pool.release(page, node.named_by_step)
            self.evicted_pages += 1
        if node.host_slot is not None:
            self.drop_host_slot(node)
        if node.parent is not None:
            node.parent.children.pop(node, None)

    # -- the host tier -----------------------------------------------------------------------------------------------

    def coldest_without_backup(self, scan: int) -> Iterator[CachedPage]:
        """Unlocked nodes among the `scan` coldest that the host does not hold, coldest first."""
        for node in tuple(islice(self._device_lru, scan)):
            if node.host_slot is None and node.named_by_step <= self._pool.completed_step:
                yield node

    def take_host_slot(self, keep: CachedPage) -> int | None:
        """A host slot for `keep`, forgetting the host's coldest node if need be; None when every slot is in use."""
        while self._host.num_free == 0:
            victim = next((node for node in self._host_lru if node is not keep), None)
            if victim is None or victim.host_named_by_step > self._host.completed_step:
                return None
            if victim.page is None:
                self._drop_subtree(victim)
            else:
                self.drop_host_slot(victim)
        return self._host.allocate()

    def back_up(self, node: CachedPage, slot: int, step: int) -> None:
        """`step` copies the node's page to the host slot; both stay, so that the page can go at once when it must."""
        node.host_slot = slot
        node.named_by_step = node.host_filled_by_step = node.host_named_by_step = step
        above: CachedPage | None = node
        while above is not None and above.locks == 0:  # children stay before their parents in the host's order
            if above.host_slot is not None:
                self._host_lru[above] = None
                self._host_lru.move_to_end(above)
            above = above.parent

    def bring_back(self, node: CachedPage, page: int, step: int) -> None:
        """`step` copies the host slot into `page`, whose one reference the caller hands over."""
        node.page = page
        node.named_by_step = node.filled_by_step = node.host_named_by_step = step
        self._by_page[page] = node
        if node.locks == 0:
            self._device_lru[node] = None

    def drop_host_slot(self, node: CachedPage) -> None:
        """Give back the node's host slot: free once the step that names it has completed. The device page, if there is
        one, stays; the caller sees to a node that is nowhere then."""
        slot = node.host_slot
        if slot is None:
            raise AssertionError("the node has no host slot")
        node.host_slot = None
        self._host_lru.pop(node, None)
        self._host.release(slot, node.host_named_by_step)

    # -- checking ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError unless the tree, the orders and the references agree."""
        nodes = list(self.nodes())
        for node in nodes:
            self._check_node(node)
        assert len(self._by_page) == sum(node.page is not None for node in nodes)
        for order in (self._device_lru, self._host_lru):
            seen = set[int]()
            for node in order:
                assert not any(child in order and id(child) not in seen for child in node.children), "parent first"
                seen.add(id(node))

    def _check_node(self, node: CachedPage) -> None:
        parent = node.parent
        assert node.entries, "a node without entries cannot be found"
        assert node.locks >= sum(child.locks > 0 for child in node.children), "a parent is held less than its children"
        assert node.page is not None or node.host_slot is not None, "a node is nowhere"
        if parent is not None:
            assert node in parent.children, "a parent does not know its child"
            assert self._page_tokens in parent.entries, "a parent is not a full page"
            assert node.page is None or parent.page is not None, "a device page under one that only the host has"
        if node.page is not None:
            assert self._by_page.get(node.page) is node, "two nodes for one page"
            assert node.locks or self._pool.references(node.page) == 1, "an unlocked node's page is referenced"
        assert (node in self._device_lru) == (node.locks == 0 and node.page is not None)
        assert (node in self._host_lru) == (node.locks == 0 and node.host_slot is not None)
