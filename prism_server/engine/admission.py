"""Who gets onto the device: refusals that are certain, order of the waiting, parking on work in flight."""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from prism_server.engine.limits import SchedulerLimits
from prism_server.engine.outcomes import Admitted, Outcome
from prism_server.engine.parking import InFlightKeys
from prism_server.engine.plan import SlotStart
from prism_server.engine.plan_builder import PlanBuilder
from prism_server.engine.prefill import Prefill
from prism_server.engine.queues import Queues
from prism_server.engine.residency import Residency
from prism_server.engine.sequence import Phase, Sequence
from prism_server.errors import BadRequest
from prism_server.identity import Digest
from prism_server.kv.cached_page import Match

MAX_FAILED_TRIES = 8
"""Waiting sequences that are tried for admission in one step although they did not fit."""
MAX_ENTERED_PAGES = 2048
"""Pages that a step assigns before it admits no more: one of a cached prefix takes the owner some microseconds, and
sixteen samples of a prompt of 262,144 tokens have 65,536 of them."""


class Admission:
    """The waiting side of the scheduler."""

    def __init__(
        self,
        limits: SchedulerLimits,
        queues: Queues,
        residency: Residency,
        in_flight: InFlightKeys,
        prefill: Prefill,
        counters: Counter[str],
        report: Callable[[Outcome], None],
    ) -> None:
        self._limits, self._queues = limits, queues
        self._residency, self._in_flight, self._prefill = residency, in_flight, prefill
        self._counters, self._report = counters, report
        self._kv = residency.kv
        self._slots = list(range(limits.max_running_sequences))  # a heap: low slots are used first
        self._without_pages: frozenset[int] = frozenset()  # numbers of those that were left waiting by the last step

    # -- refusals ----------------------------------------------------------------------------------------------------

    def refuse_impossible(self, sequence: Sequence) -> None:
        """Raise BadRequest for what can never run, with the arithmetic."""
        prompt, limits, kv = sequence.prompt_tokens, self._limits, self._kv
        if prompt >= limits.max_context_tokens:
            raise BadRequest(
                f"the prompt has {prompt} tokens and the context holds {limits.max_context_tokens}, answer included",
                param="messages",
                code="context_length_exceeded",
            )
        capacity = kv.pool.num_pages * kv.page_tokens
        if prompt > capacity:
            raise BadRequest(
                f"the prompt has {prompt} tokens = {kv.pages_for(prompt)} pages of {kv.page_tokens}, "
                f"and the KV cache has {kv.pool.num_pages} pages",
                param="messages",
                code="context_length_exceeded",
            )
        self._prefill.check_budget(sequence)

    def max_outputs(self, sequence: Sequence) -> int:
        """Tokens that the sequence may generate: what it asked for, within the context and the pool.

        The last token is never computed, so it needs no row.
        """
        rows = min(self._limits.max_context_tokens, self._kv.pool.num_pages * self._kv.page_tokens + 1)
        return min(sequence.request.params.max_tokens, rows - sequence.prompt_tokens)

    # -- order -------------------------------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        """A sequence that is in no queue waits for admission: new, woken or preempted. Its work is estimated now, by
        what is cached."""
        sequence.phase = Phase.WAITING
        rows = self._residency.match(sequence).rows(self._kv.page_tokens)
        sequence.uncached_estimate = sequence.num_known - rows
        self._queues.waiting.append(sequence)

    def priority(self, sequence: Sequence, work_tokens: int, now_s: float) -> tuple[int, int, int]:
        """Least uncached work first; who has waited longer than the ageing goes before, in order of arrival."""
        if now_s - sequence.request.arrival_s > self._limits.ageing_s:
            return (0, 0, sequence.number)
        return (1, work_tokens, sequence.number)

    # -- admission ---------------------------------------------------------------------------------------------------

    def hot_tokens(self, work_tokens: int) -> int:
        """Rows of the waiting that have less to compute than `work_tokens` and may get a slot in this step: not of
        those for which the last one had no pages."""
        new = (s.uncached_estimate for s in self._queues.waiting if s.number not in self._without_pages)
        return sum(sorted(work for work in new if work < work_tokens)[: len(self._slots)])

    def admit(self, builder: PlanBuilder, now_s: float, is_idle: bool) -> Iterator[Sequence]:
        """Take waiting sequences onto the device while there are slots and pages; each is yielded as it gets there.

        `is_idle`: no step is launched, so that nothing more becomes free by waiting.
        """
        failed = 0
        for sequence in sorted(self._queues.waiting, key=lambda s: self.priority(s, s.uncached_estimate, now_s)):
            if not self._slots or failed >= MAX_FAILED_TRIES or len(builder.pages) >= MAX_ENTERED_PAGES:
                break
            match = self._residency.match(sequence)
            in_flight = self._key_in_flight(sequence, match)
            if in_flight is not None:
                self._park(sequence, *in_flight)
            elif self._fits(sequence, match, is_idle):
                self._enter(builder, sequence, match, now_s)
                yield sequence
            else:
                failed += 1
                if self.priority(sequence, 0, now_s)[0] == 0:
                    break  # who has waited long enough is not overtaken
        self._without_pages = frozenset(s.number for s in self._queues.waiting) if failed else frozenset()

    def _key_in_flight(self, sequence: Sequence, match: Match) -> tuple[Digest, int] | None:
        """The deepest key beyond the match that another sequence is computing, and the rows that it covers."""
        if not self._kv.index.enabled:
            return None
        page_tokens, hit = self._kv.page_tokens, match.rows(self._kv.page_tokens)
        if hit >= sequence.num_known - 1:
            return None  # the last row is computed anyway
        keys, is_led = sequence.keys, self._in_flight.is_led
        page = next((page for page in range(len(keys) - 1, hit // page_tokens - 1, -1) if is_led(keys[page])), -1)
        rows, key = (page + 1) * page_tokens, keys[page] if page >= 0 else None
        for boundary in sequence.boundaries:
            if boundary.rows > max(rows, hit) and is_led(boundary.key):
                rows, key = boundary.rows, boundary.key
        return None if key is None else (key, rows)

    def _keys_beyond(self, sequence: Sequence, hit: int) -> list[tuple[int, Digest]]:
        page_tokens = self._kv.page_tokens
        keys = sequence.keys
        pages = [((page + 1) * page_tokens, keys[page]) for page in range(hit // page_tokens, len(keys))]
        return pages + [(boundary.rows, boundary.key) for boundary in sequence.boundaries if boundary.rows > hit]

    def _park(self, sequence: Sequence, key: Digest, rows: int) -> None:
        self._queues.waiting.remove(sequence)
        sequence.phase = Phase.PARKED
        self._queues.parked.append(sequence)
        self._in_flight.park(sequence, key, rows)
        self._counters["parked"] += 1

    def _fits(self, sequence: Sequence, match: Match, is_idle: bool) -> bool:
        """Whether the whole known prompt fits beside what the running prefills still need; alone it always does."""
        kv, running = self._kv, self._queues.running
        if not running:
            return is_idle or kv.num_available >= kv.pages_for(sequence.num_known)
        promised = sum(max(0, kv.pages_for(s.num_prefill) - len(s.table)) for s in running)
        evictable_hits = sum(node.locks == 0 and node.page is not None for node in match.nodes)
        return self._residency.num_missing_pages(sequence, match) + promised + evictable_hits <= kv.num_available

    def _enter(self, builder: PlanBuilder, sequence: Sequence, match: Match, now_s: float) -> None:
        self._queues.waiting.remove(sequence)
        sequence.slot = heapq.heappop(self._slots)
        prompt, params = sequence.request.prompt.token_ids, sequence.request.params
        builder.slot_starts.append(SlotStart(sequence.slot, params, sequence.seed, prompt, tuple(sequence.outputs)))
        sequence.num_prefill = sequence.num_known
        self._residency.enter(builder, sequence, match)
        bisect.insort(self._queues.running, sequence, key=lambda s: s.number)
        self._lead(sequence)
        self._prefill.want_missing(sequence)
        if sequence.ready_step > self._kv.pool.completed_step:
            sequence.phase = Phase.SWAPPING
        else:
            sequence.phase = Phase.MEDIA if sequence.wanted else Phase.PREFILL
        if sequence.admitted_s is None:
            sequence.admitted_s = now_s
            self._count_first_hit(sequence)

    def _lead(self, sequence: Sequence) -> None:
        if self._kv.index.enabled:
            keys = [key for _, key in self._keys_beyond(sequence, sequence.num_planned) if key not in self._kv.index]
            self._in_flight.lead(sequence, keys)

    def _count_first_hit(self, sequence: Sequence) -> None:
        counters, hit = self._counters, sequence.num_cached
        media, media_hit = sequence.media_tokens_in(0, sequence.prompt_tokens), sequence.media_tokens_in(0, hit)
        sequence.first_cached_tokens, sequence.first_cached_media_tokens = hit, media_hit
        counters["prefix_queried_tokens"] += sequence.prompt_tokens
        counters["prefix_queried_media_tokens"] += media
        counters["prefix_hit_tokens"] += hit
        counters["prefix_hit_media_tokens"] += media_hit
        self._report(Admitted(sequence))

    def give_slot_back(self, sequence: Sequence) -> None:
        """The sequence leaves the device: the next plan may start another one in its slot."""
        assert sequence.slot is not None
        heapq.heappush(self._slots, sequence.slot)
        sequence.slot = None
