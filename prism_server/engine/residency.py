"""How a sequence gets onto the device and off it: match, lock, copies, pages, publication."""

from __future__ import annotations

from prism_server.engine.plan import RowCopy
from prism_server.engine.plan_builder import PlanBuilder
from prism_server.engine.sequence import Sequence
from prism_server.identity import Digest, page_key
from prism_server.kv.cache import KVCache
from prism_server.kv.cached_page import CachedPage, Match
from prism_server.prompt.encoded import Boundary
from prism_server.prompt.keys import page_spans


class Residency:
    """Sequence-level operations on the KV cache. Pure bookkeeping; copies go into the plan."""

    def __init__(self, kv: KVCache) -> None:
        self.kv = kv

    # -- coming ------------------------------------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> Match:
        """What is cached of the sequence's known rows; at least one row is left to compute."""
        boundaries = [(boundary.rows, boundary.key) for boundary in sequence.boundaries]
        return self.kv.index.match(sequence.keys, boundaries, sequence.num_known - 1)

    def num_missing_pages(self, sequence: Sequence, match: Match) -> int:
        """Pages that the sequence's known rows need beyond the matched ones that are on the device."""
        return self.kv.pages_for(sequence.num_known) - sum(node.page is not None for node in match.nodes)

    def enter(self, builder: PlanBuilder, sequence: Sequence, match: Match) -> None:
        """Take over the matched prefix: lock it, bring back what the host has, copy the tail's rows.

        What gets no page now is left out of the hit and computed again.
        """
        index, page_tokens = self.kv.index, self.kv.page_tokens
        self._hold(match)
        nodes: list[CachedPage] = []
        for node in match.nodes:
            if node.page is None and not self._bring_back(builder, node):
                break
            nodes.append(node)
        complete = len(nodes) == len(match.nodes)
        sequence.node = nodes[-1] if nodes else None
        sequence.ready_step = max((node.filled_by_step for node in nodes), default=0)
        for node in nodes:
            assert node.page is not None
            self.kv.pool.retain(node.page)
            builder.assign_page(sequence, node.page)
        rows = len(nodes) * page_tokens
        if complete and match.tail is not None and self._copy_tail(builder, sequence, match.tail, match.tail_rows):
            rows += match.tail_rows
            match.tail.named_by_step = builder.step
        index.lock_path(sequence.node)
        self._let_go(match)
        sequence.num_planned = sequence.num_computed = sequence.num_published = sequence.num_cached = rows
        sequence.last_step = builder.step
        for boundary in sequence.boundaries:
            if boundary.rows <= rows:
                index.note_media_key(boundary.key, boundary.media_key)

    def _hold(self, match: Match) -> None:
        self.kv.index.lock_path(match.nodes[-1] if match.nodes else None)
        self.kv.index.lock_path(match.tail)

    def _let_go(self, match: Match) -> None:
        self.kv.index.unlock_path(match.tail, named_by_step=0)
        self.kv.index.unlock_path(match.nodes[-1] if match.nodes else None, named_by_step=0)

    def _bring_back(self, builder: PlanBuilder, node: CachedPage) -> bool:
        assert node.host_slot is not None
        if node.host_filled_by_step > self.kv.pool.completed_step or not self.kv.try_free(1):
            return False
        page = self.kv.pool.allocate()
        builder.swap_in.append((node.host_slot, page))
        self.kv.index.bring_back(node, page, builder.step)
        return True

    def _copy_tail(self, builder: PlanBuilder, sequence: Sequence, tail: CachedPage, rows: int) -> bool:
        """A private page with the tail's rows: it inherits no key, and the source never changes."""
        waits = tail.page is None and tail.host_filled_by_step > self.kv.pool.completed_step
        filling = tail.page is not None and tail.filled_by_step > self.kv.pool.completed_step
        if waits or filling or not self.kv.try_free(1):
            return False
        page = self.kv.pool.allocate()
        if tail.page is not None:
            builder.row_copies.append(RowCopy(tail.page, page, rows))
        else:
            assert tail.host_slot is not None
            builder.swap_in.append((tail.host_slot, page))
            tail.host_named_by_step = builder.step
            sequence.ready_step = builder.step
        builder.assign_page(sequence, page)
        return True

    # -- growing -----------------------------------------------------------------------------------------------------

    def rows_that_fit(self, sequence: Sequence) -> int:
        """Rows that its table and the pages that are free now (idle prefixes forgotten) hold; asks, changes nothing."""
        free = self.kv.pool.num_free + self.kv.index.num_evictable
        return (len(sequence.table) + free) * self.kv.page_tokens

    def try_grow(self, builder: PlanBuilder, sequence: Sequence, rows: int) -> bool:
        """Give the sequence pages for `rows` rows, without taking any from a live sequence."""
        missing = self.kv.pages_for(rows) - len(sequence.table)
        if missing > 0:
            self._share_twins(sequence)
            if not self.kv.try_free(missing):
                return False
            for _ in range(missing):
                builder.assign_page(sequence, self.kv.pool.allocate())
        return True

    # -- publishing --------------------------------------------------------------------------------------------------

    def publish(self, sequence: Sequence) -> list[Digest]:
        """Offer every page and boundary that is computed now to the index. Returns the keys that can be found."""
        first, last, page_tokens = sequence.num_published, sequence.num_computed, self.kv.page_tokens
        if first // page_tokens == last // page_tokens and sequence.last_boundary_rows <= first:
            sequence.num_published = last  # most decode steps: nothing new to be found
            return []
        published: list[Digest] = []
        for rows, key, media_key in self._newly_computed(sequence):
            self._publish_one(sequence, rows, key, media_key)
            published.append(key)
        sequence.num_published = sequence.num_computed
        return published

    def add_fork_point(self, sequence: Sequence) -> None:
        """Samples of one request share all rows of the prompt but the last, which each computes for itself."""
        self._add_boundary(sequence, sequence.prompt_tokens - 1)

    def publish_tail(self, sequence: Sequence) -> None:
        """Before a preemption: make the computed rows of the last, partial page findable, too."""
        key = self._add_boundary(sequence, sequence.num_computed)
        if key is not None:
            self._publish_one(sequence, sequence.num_computed, key, None)

    def _add_boundary(self, sequence: Sequence, rows: int) -> Digest | None:
        """The key of a new boundary at `rows`; None where a page or a boundary ends there already."""
        if rows % self.kv.page_tokens == 0 or any(boundary.rows == rows for boundary in sequence.boundaries):
            return None
        key = self._key(sequence, rows // self.kv.page_tokens, rows)
        sequence.add_boundary(Boundary(rows, key, None))
        return key

    def _newly_computed(self, sequence: Sequence) -> list[tuple[int, Digest, Digest | None]]:
        """(rows, key, media-chain key) of the points in (num_published, num_computed], in order of rows."""
        page_tokens, first, last = self.kv.page_tokens, sequence.num_published, sequence.num_computed
        closed = {b.rows: b for b in sequence.boundaries if first < b.rows <= last}
        points = [(b.rows, b.key, b.media_key) for b in closed.values() if b.rows % page_tokens]
        for page in range(first // page_tokens, last // page_tokens):
            end = (page + 1) * page_tokens
            if page == len(sequence.keys):
                sequence.keys.append(self._key(sequence, page, end))
            points.append((end, sequence.keys[page], closed[end].media_key if end in closed else None))
        return sorted(points, key=lambda point: point[0])

    def _key(self, sequence: Sequence, page: int, end: int) -> Digest:
        """Key of the sequence's rows of `page` below row `end`."""
        start = page * self.kv.page_tokens
        parent = sequence.keys[page - 1] if page else sequence.request.prompt.seed
        return page_key(parent, sequence.ids(start, end), page_spans(sequence.spans, start, end))

    def _publish_one(self, sequence: Sequence, rows: int, key: Digest, media_key: Digest | None) -> None:
        page_tokens = self.kv.page_tokens
        number = (rows - 1) // page_tokens
        page = sequence.table[number]
        stands_on_it = sequence.node is not None and sequence.node.page == page
        parent = sequence.node.parent if stands_on_it and sequence.node is not None else sequence.node
        node = self.kv.index.publish(parent, key, page, rows - number * page_tokens, media_key)
        if node is None or node is sequence.node:
            return
        self.kv.index.move_lock(sequence.node, node)
        sequence.node = node
        if node.page is not None and node.page != page:
            sequence.twins.append((number, node))
            self._share_twins(sequence)

    def _share_twins(self, sequence: Sequence) -> None:
        """A sequence that alone fits must not hold two pages for the same rows: it would not fit any more."""
        filling: list[tuple[int, CachedPage]] = []
        for number, node in sequence.twins:
            if node.filled_by_step > self.kv.pool.completed_step:
                filling.append((number, node))
            elif node.page is not None:
                self._share(sequence, number, node.page)
        sequence.twins = filling

    def _share(self, sequence: Sequence, number: int, page: int) -> None:
        """The same rows lie in `page`, too: the sequence goes on with that one and gives its own back."""
        own = sequence.table[number]
        self.kv.pool.retain(page)
        self.kv.pool.release(own, sequence.last_step)
        sequence.table[number] = page
        sequence.moved.append((number, page))

    # -- going -------------------------------------------------------------------------------------------------------

    def leave(self, sequence: Sequence) -> None:
        """Give back pages and locks; what is published stays findable."""
        self.kv.index.unlock_path(sequence.node, sequence.last_step)
        sequence.node = None
        for page in sequence.table:
            self.kv.pool.release(page, sequence.last_step)
        sequence.table.clear()
        sequence.moved.clear()
        sequence.twins.clear()
