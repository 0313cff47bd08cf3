"""Who gets onto the device: refusals that are certain, order of the waiting, parking on work in flight."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

from prism_server.engine.cost_model import StepBudget
from prism_server.engine.outcomes import Admitted
from prism_server.engine.plan import SlotStart
from prism_server.engine.plan_builder import PlanBuilder
from prism_server.engine.sequence import Phase, Sequence
from prism_server.errors import BadRequest
from prism_server.identity import Digest
from prism_server.kv.prefix_index import Match

if TYPE_CHECKING:
    from prism_server.engine.scheduler import Scheduler

MAX_FAILED_TRIES = 8
"""Waiting sequences that are tried for admission in one step although they did not fit."""


class Admission:
    """The waiting side of the scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._limits = scheduler.limits
        self._kv = scheduler.kv
        self._slots = list(range(self._limits.max_running_sequences))  # a heap: low slots are used first

    # -- refusals ----------------------------------------------------------------------------------------------------

    def refuse_impossible(self, sequence: Sequence, feature_bytes: Callable[[int], int]) -> None:
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
        budget = self._scheduler.features.capacity_bytes
        for facts in sequence.missing_items():
            needed = feature_bytes(facts.num_tokens)
            if needed > budget:
                raise BadRequest(
                    f"a medium of {facts.num_tokens} tokens needs {needed} bytes of encoder output, "
                    f"and the budget is {budget} bytes",
                    param="messages",
                )

    def max_outputs(self, sequence: Sequence) -> int:
        """Tokens that the sequence may generate: what it asked for, within the context and the pool.

        The last token is never computed, so it needs no row.
        """
        rows = min(self._limits.max_context_tokens, self._kv.pool.num_pages * self._kv.page_tokens + 1)
        return min(sequence.request.params.max_tokens, rows - sequence.prompt_tokens)

    # -- order -------------------------------------------------------------------------------------------------------

    def enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        rows = self._scheduler.residency.match(sequence).rows(self._kv.page_tokens)
        sequence.uncached_estimate = sequence.num_known - rows
        self._scheduler.waiting.append(sequence)

    def priority(self, sequence: Sequence, work_tokens: int, now_s: float) -> tuple[int, int, int]:
        """Least uncached work first; who has waited longer than the ageing goes before, in order of arrival."""
        if now_s - sequence.request.arrival_s > self._limits.ageing_s:
            return (0, 0, sequence.number)
        return (1, work_tokens, sequence.number)

    # -- admission ---------------------------------------------------------------------------------------------------

    def admit(self, builder: PlanBuilder, budget: StepBudget, now_s: float) -> None:
        """Take waiting sequences onto the device while there are slots and pages, and give them their first chunk."""
        scheduler, failed = self._scheduler, 0
        order = sorted(scheduler.waiting, key=lambda s: self.priority(s, s.uncached_estimate, now_s))
        for sequence in order:
            if not self._slots or failed >= MAX_FAILED_TRIES:
                break
            match = scheduler.residency.match(sequence)
            key = self._key_in_flight(sequence, match)
            if key is not None:
                self._park(sequence, key)
            elif self._fits(builder, sequence, match):
                self._enter(builder, sequence, match, now_s)
                if sequence.phase is Phase.PREFILL:
                    scheduler.plan_chunk(builder, budget, sequence)
            elif self.priority(sequence, 0, now_s)[0] == 0:
                break  # who has waited long enough is not overtaken
            else:
                failed += 1

    def _key_in_flight(self, sequence: Sequence, match: Match) -> Digest | None:
        """The deepest key beyond the match that another sequence is computing."""
        if not self._kv.index.enabled:
            return None
        page_tokens, in_flight = self._kv.page_tokens, self._scheduler.in_flight
        hit, limit = match.rows(page_tokens), sequence.num_known - 1
        best: tuple[int, Digest] | None = None
        for rows, key in self._keys_beyond(sequence, hit):
            if min(rows, limit) > (best[0] if best else hit) and in_flight.leader_or_none(key) is not None:
                best = rows, key
        return best[1] if best else None

    def _keys_beyond(self, sequence: Sequence, hit: int) -> list[tuple[int, Digest]]:
        page_tokens = self._kv.page_tokens
        keys = sequence.keys
        pages = [((page + 1) * page_tokens, keys[page]) for page in range(hit // page_tokens, len(keys))]
        return pages + [(boundary.rows, boundary.key) for boundary in sequence.boundaries if boundary.rows > hit]

    def _park(self, sequence: Sequence, key: Digest) -> None:
        self._scheduler.waiting.remove(sequence)
        sequence.phase = Phase.PARKED
        self._scheduler.parked.append(sequence)
        self._scheduler.in_flight.park(sequence, key)
        self._scheduler.counters["parked"] += 1

    def _fits(self, builder: PlanBuilder, sequence: Sequence, match: Match) -> bool:
        """Whether the whole known prompt fits beside what the running prefills still need; alone it always does."""
        scheduler, kv = self._scheduler, self._kv
        if not scheduler.running:
            return scheduler.num_launched == 0 or kv.num_available >= kv.pages_for(sequence.num_known)
        promised = sum(max(0, kv.pages_for(s.num_prefill) - len(s.table)) for s in scheduler.running)
        evictable_hits = sum(node.locks == 0 and node.page is not None for node in match.nodes)
        needed = scheduler.residency.num_missing_pages(sequence, match)
        return needed + promised + evictable_hits <= kv.num_available

    def _enter(self, builder: PlanBuilder, sequence: Sequence, match: Match, now_s: float) -> None:
        scheduler = self._scheduler
        scheduler.waiting.remove(sequence)
        sequence.slot = heapq.heappop(self._slots)
        prompt, params = sequence.request.prompt.token_ids, sequence.request.params
        builder.slot_starts.append(SlotStart(sequence.slot, params, sequence.seed, prompt, tuple(sequence.outputs)))
        sequence.num_prefill = sequence.num_known
        scheduler.residency.enter(builder, sequence, match)
        scheduler.running.append(sequence)
        scheduler.running.sort(key=lambda s: s.number)
        self._lead(sequence)
        scheduler.want_media(sequence)
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
            self._scheduler.in_flight.lead(sequence, keys)

    def _count_first_hit(self, sequence: Sequence) -> None:
        counters, hit = self._scheduler.counters, sequence.num_cached
        media, media_hit = sequence.media_tokens_in(0, sequence.prompt_tokens), sequence.media_tokens_in(0, hit)
        sequence.first_cached_tokens, sequence.first_cached_media_tokens = hit, media_hit
        counters["prefix_queried_tokens"] += sequence.prompt_tokens
        counters["prefix_queried_media_tokens"] += media
        counters["prefix_hit_tokens"] += hit
        counters["prefix_hit_media_tokens"] += media_hit
        self._scheduler.report(Admitted(sequence))

    def give_slot_back(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        heapq.heappush(self._slots, sequence.slot)
        sequence.slot = None
