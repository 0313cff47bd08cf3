"""A world for the scheduler: requests that share prefixes and media, on the simulated device."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace

import numpy as np
from simulated_device import (
    BYTES_PER_FEATURE,
    CLOSE,
    EOS,
    OPEN,
    PAD,
    VISION_BLOCKS,
    VOCABULARY,
    SimulatedExecutor,
    Sizes,
    drawn_token,
    feature,
    row_bytes,
)

from prism_server.engine.feature_cache import FeatureCache
from prism_server.engine.limits import SchedulerLimits
from prism_server.engine.messages import GenerateRequest, SamplingParams
from prism_server.engine.outcomes import Admitted, Drawn, Finished
from prism_server.engine.plan import StepPlan
from prism_server.engine.scheduler import Scheduler
from prism_server.engine.sequence import Phase, Sequence
from prism_server.errors import BadRequest
from prism_server.identity import (
    MediaPart,
    TextPart,
    cache_seed,
    content_id,
    media_chain_keys,
    namespace_digest,
    page_key,
)
from prism_server.kv.cache import KVCache
from prism_server.media.item import ItemFacts, ItemKey, MediaItem
from prism_server.prompt.encoded import EncodedPrompt, MediaSpan
from prism_server.prompt.keys import PageChain, boundaries, page_spans

__all__ = ["Sizes", "World"]


class World:
    """Drives a real scheduler, KV cache and feature cache, and checks what must hold after every move."""

    def __init__(self, sizes: Sizes, rng: random.Random, num_items: int = 3) -> None:
        self.sizes, self.rng = sizes, rng
        self.now_s = 0.0
        self.kv = KVCache(sizes.num_pages, sizes.page_tokens, sizes.host_slots, sizes.prefix_cache)
        self.features = FeatureCache(sizes.feature_tokens * BYTES_PER_FEATURE)
        limits = SchedulerLimits(
            max_context_tokens=64,
            max_running_sequences=sizes.max_running,
            max_step_tokens=max(sizes.max_step_tokens, sizes.max_running),
            chunk_tokens=sizes.chunk_tokens,
            step_budget_ms=5.0,
            ageing_s=20.0,
            eos_token_ids=frozenset({EOS}),
        )
        self.scheduler = Scheduler(limits, self.kv, self.features, lambda n: n * BYTES_PER_FEATURE, VISION_BLOCKS)
        if sizes.overcommit:
            self.scheduler._admission._fits = lambda *_: True  # type: ignore[method-assign]
        self.executor = SimulatedExecutor(sizes, rng)
        self.items = [self.make_item(f"item {i}", rng.randint(1, 5)) for i in range(num_items)]
        self.launched: deque[StepPlan] = deque()
        self.pending_media: list[ItemKey] = []
        self.requests: dict[str, list[Sequence]] = {}
        self.expected: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self.oracle: dict[str, list[int]] = {}
        self.admitted: set[int] = set()
        self.final: Counter[int] = Counter()
        self.emitted: dict[int, list[int]] = {}
        self.ended: list[Finished] = []
        self.seed = cache_seed(namespace_digest("world", "", "fp8", ""), None)
        self.next_number = self.next_request = 0
        self.num_steps = self.num_moves = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    @staticmethod
    def make_item(name: str, num_tokens: int) -> tuple[MediaItem, ItemFacts]:
        data = name.encode()
        key = ItemKey(content_id("image", data), content_id("layout", b""))
        return MediaItem("image", data), ItemFacts(key, "image", (1, num_tokens, 4), num_tokens, 1, 1)

    def make_request(
        self, parts: list[int | str], max_tokens: int = 4, n: int = 1, ignore_eos: bool = False
    ) -> GenerateRequest:
        """`parts`: item numbers, and texts whose characters are tokens 1 to 5."""
        ids: list[int] = []
        spans: list[MediaSpan] = []
        media: list[MediaItem] = []
        chain: list[TextPart | MediaPart] = []
        for part in parts:
            if isinstance(part, str):
                ids += [1 + ord(c) % (VOCABULARY - 1) for c in part]
                chain.append(TextPart("user", part))
            else:
                item, facts = self.items[part]
                start = len(ids) + 1
                ids += [OPEN, *[PAD] * facts.num_tokens, CLOSE]
                spans.append(MediaSpan(start, facts.num_tokens, start + facts.num_tokens + 1, len(media), facts))
                media.append(item)
                chain.append(MediaPart("user", "image", facts.key.content_id))
        token_ids = np.asarray(ids, dtype=np.int32)
        pages = PageChain(self.seed, token_ids, spans, self.sizes.page_tokens)
        prompt = EncodedPrompt(
            token_ids,
            np.zeros((3, len(ids)), dtype=np.int32),
            0,
            tuple(spans),
            self.seed,
            pages.page_keys,
            boundaries(pages, spans, media_chain_keys(self.seed, chain)),
        )
        params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=ignore_eos)
        name = f"request {self.next_request}"
        self.next_request += 1
        return GenerateRequest(name, prompt, tuple(media), params, self.now_s)

    def add(self, request: GenerateRequest) -> list[Sequence] | None:
        """None when the request is refused."""
        sequences = []
        for sample in range(request.params.n):
            sequence = Sequence(self.next_number, request, sample, seed=sample, max_outputs=request.params.max_tokens)
            sequences.append(sequence)
            self.next_number += 1
        before = dict(self.scheduler.counters)
        try:
            self.scheduler.add(sequences)
        except BadRequest:
            assert dict(self.scheduler.counters) == before
            return None
        self.requests[request.request_id] = sequences
        for sequence in sequences:
            self.emitted[sequence.number] = []
        self._register(request, sequences[0])
        return sequences

    def _register(self, request: GenerateRequest, sequence: Sequence) -> None:
        """What the request must say, and the bytes that each of its page and boundary keys stands for."""
        prompt, page_tokens = request.prompt, self.sizes.page_tokens
        rows, outputs = self._alone(request, sequence.max_outputs)
        self.oracle[request.request_id] = outputs
        ids = np.concatenate([prompt.token_ids, np.asarray(outputs, dtype=np.int32)])
        parent = prompt.seed
        for end in range(1, len(rows) + 1):
            start = (end - 1) // page_tokens * page_tokens
            key = page_key(parent, ids[start:end], page_spans(prompt.spans, start, end))
            self.expected[key] = rows[start:end]
            parent = key if end % page_tokens == 0 else parent

    @staticmethod
    def _alone(request: GenerateRequest, max_outputs: int) -> tuple[list[tuple[bytes, bytes]], list[int]]:
        """Rows and outputs of a request that runs by itself, from the start, without any cache."""
        prompt = request.prompt
        shown = {
            span.start + i: feature(span.facts.key, span.item_offset + i)
            for span in prompt.spans
            for i in range(span.rows)
        }
        rows: list[tuple[bytes, bytes]] = []
        for number, token in enumerate(prompt.token_ids):
            rows.append(row_bytes(rows, shown.get(number, int(token))))
        outputs = [drawn_token(rows[-1])]
        while len(outputs) < max_outputs and (outputs[-1] != EOS or request.params.ignore_eos):
            rows.append(row_bytes(rows, outputs[-1]))
            outputs.append(drawn_token(rows[-1]))
        return rows, outputs

    # -- moves -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Launch the next step if there is one; complete the oldest when enough are launched. False: nothing to do."""
        self.now_s += self.rng.random()
        plan = self.scheduler.schedule(self.now_s)
        self._take_media_requests()
        if plan is not None:
            self.num_steps += 1
            self.executor.launch(plan)
            self.launched.append(plan)
        else:
            self._check_nothing_can_be_done()
        if self.launched and (plan is None or len(self.launched) > self.sizes.depth):
            self.complete()
            return True
        self.check()
        return plan is not None

    def complete(self) -> None:
        plan = self.launched.popleft()
        result = self.executor.complete(plan.step)
        work_ms = plan.num_tokens * 0.3 + len(plan.encode) * 2.0
        computed = {sequence: sequence.num_computed for sequence in self.scheduler.running}
        self.scheduler.complete(replace(result, duration_ms=work_ms, encode_ms=len(plan.encode) * 2.0), self.now_s)
        for sequence in self.scheduler.running:
            self._check_published(sequence, computed[sequence])
        self._take_outcomes()
        self.check()

    def media_arrives(self, number: int, fails: bool = False) -> None:
        key = self.pending_media.pop(number)
        if fails:
            self.scheduler.media_failed(key, BadRequest("the picture is damaged"))
        else:
            self.executor.stage(key)
            self.scheduler.media_arrived(key, decoded=True, now_s=self.now_s)
        self._take_outcomes()
        self.check()

    def cancel(self, request_id: str) -> None:
        for sequence in self.requests[request_id]:
            self.scheduler.end(sequence, "cancelled")
            assert not sequence.table
            assert sequence.slot is None
        self._take_outcomes()
        self.check()

    def _take_media_requests(self) -> None:
        for key in self.scheduler.take_abandoned_media():
            if key in self.pending_media:  # else it came just before
                self.pending_media.remove(key)
        self.pending_media += [request.facts.key for request in self.scheduler.take_media_requests()]
        assert len(set(self.pending_media)) == len(self.pending_media), "an item is prepared twice at a time"

    def drain(self, limit: int = 5000) -> None:
        """Let everything end by itself; fails when it does not."""
        for _ in range(limit):
            while self.pending_media:
                self.media_arrives(0)
            if not self.step() and not self.pending_media:
                break
        assert not self.scheduler.has_work, "the engine stands still with work left"
        self.check_idle()

    def live_requests(self) -> list[str]:
        return [
            name for name, sequences in self.requests.items() if any(s.phase is not Phase.FINISHED for s in sequences)
        ]

    # -- checks ------------------------------------------------------------------------------------------------------

    def _take_outcomes(self) -> None:
        for outcome in self.scheduler.take_outcomes():
            sequence = outcome.sequence
            if isinstance(outcome, Admitted):
                assert sequence.number not in self.admitted, "a sequence is admitted for the first time twice"
                self.admitted.add(sequence.number)
            elif isinstance(outcome, Drawn):
                assert not self.final[sequence.number], "a token is emitted after the end"
                self.emitted[sequence.number].append(outcome.token_id)
            else:
                self.final[sequence.number] += 1
                self.ended.append(outcome)
                self._check_end(outcome)

    def _check_end(self, finished: Finished) -> None:
        sequence = finished.sequence
        name, said = sequence.request.request_id, self.emitted[sequence.number]
        assert self.final[sequence.number] == 1, "a sequence ends twice"
        expected = self.oracle[name]
        assert said == expected[: len(said)], f"{name} says {said}, alone it says {expected}"
        if finished.reason in ("stop", "length"):
            assert said == expected, f"{name} stops early: {said} of {expected}"
        assert sequence.encoded_items <= len({s.facts.key for s in sequence.spans}) * (
            1 + sequence.preemptions + sequence.lost_pins
        ), "an item is encoded more often than 1 + its preemptions"

    def _check_nothing_can_be_done(self) -> None:
        if self.launched:
            return
        phases = Counter(sequence.phase for sequence in self.scheduler.running)
        assert not phases[Phase.PREFILL] + phases[Phase.DECODE] + phases[Phase.SWAPPING], f"no step, but {phases}"
        assert not self.scheduler.waiting or self.scheduler.running, "no step, but sequences wait and nothing runs"

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check_integrity()
        pool = self.kv.pool
        used = sum(pool.references(page) > 0 for page in range(pool.num_pages))
        assert pool.num_free + pool.num_retired + used == pool.num_pages, "free + used is not the total"
        for node in self.kv.index.nodes():
            for entry in node.entries.values():
                expected = self.expected[entry.key]
                if node.page is not None and node.filled_by_step <= pool.completed_step:
                    assert self.executor.pages[node.page][: entry.rows] == expected, f"a cached page changed {node}"
                if node.host_slot is not None and node.host_filled_by_step <= pool.completed_step:
                    assert self.executor.host[node.host_slot][: entry.rows] == expected, "a host slot changed"

    def _check_published(self, sequence: Sequence, computed_before: int) -> None:
        """What is computed can be found. (That nothing else can, the bytes under every key show.)"""
        if not self.sizes.prefix_cache:
            assert not list(self.kv.index.nodes()), "the cache is off, but something is cached"
            return
        for number, key in enumerate(sequence.keys, 1):
            if number * self.sizes.page_tokens <= sequence.num_computed:
                assert key in self.kv.index, "a computed page cannot be found"
        for boundary in sequence.boundaries:
            if boundary.media_key is not None and computed_before < boundary.rows <= sequence.num_computed:
                assert boundary.key in self.kv.index, "a computed boundary cannot be found"

    def check_idle(self) -> None:
        """Running and waiting are empty, every page is free or evictable, every table of requests is empty."""
        scheduler, pool = self.scheduler, self.kv.pool
        assert not scheduler.has_work
        assert not self.launched
        assert pool.num_free + self.kv.index.num_evictable == pool.num_pages
        assert scheduler.desk.num_staged == scheduler.desk.num_pending == scheduler.in_flight.num_parked == 0
        self.executor.finish_queue()
        assert not self.executor.staged or set(self.executor.staged) == set(scheduler.desk.take_dropped())
        assert all(self.final[s.number] == 1 for sequences in self.requests.values() for s in sequences)
        assert all(not self.features.pinned_by(s.number) for sequences in self.requests.values() for s in sequences)
        scheduler.forget_idle_caches()
        assert pool.num_free == pool.num_pages
        assert self.kv.host.num_free == self.kv.host.num_pages
