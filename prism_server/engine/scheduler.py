"""The scheduler: which rows, copies and encoder blocks the next step holds. Pure: no torch, no clock, no I/O.

Rules that keep it moving: the oldest runnable sequence may take pages from every younger one, and pins from every other
when nothing else can be done; nobody else may. A sequence is admitted only if it alone fits. So the oldest always ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from prism_server.engine.admission import Admission
from prism_server.engine.cost_model import CostModel, StepBudget
from prism_server.engine.feature_cache import FeatureCache
from prism_server.engine.launched import LaunchedStep, LaunchedSteps
from prism_server.engine.limits import SchedulerLimits
from prism_server.engine.media_desk import MediaDesk, MediaRequest
from prism_server.engine.messages import TokenLogprob
from prism_server.engine.outcomes import Drawn, Finished, Outcome
from prism_server.engine.parking import InFlightKeys
from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.plan_builder import PlanBuilder
from prism_server.engine.prefill import Prefill
from prism_server.engine.queues import Queues
from prism_server.engine.residency import Residency
from prism_server.engine.sequence import Phase, Sequence
from prism_server.errors import EngineFault, PrismError
from prism_server.kv.cache import KVCache
from prism_server.media.item import ItemKey


class Scheduler:
    """Sequences the managers; owns the sequences' phases. Called by the owner thread only."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCache,
        features: FeatureCache,
        feature_bytes: Callable[[int], int],
        vision_blocks: int,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.features = features
        self.desk = MediaDesk()
        self.in_flight = InFlightKeys()
        self.vision_blocks = vision_blocks
        self.cost = CostModel(limits.step_budget_ms, limits.max_step_tokens, limits.max_replayed_tokens)
        self.counters: Counter[str] = Counter()
        self.queues = Queues()
        self._outcomes: list[Outcome] = []
        self._residency = Residency(kv)
        self._prefill = Prefill(features, self.desk, feature_bytes, vision_blocks, self.counters)
        self._admission = Admission(
            limits, self.queues, self._residency, self.in_flight, self._prefill, self.counters, self._outcomes.append
        )
        self._launched = LaunchedSteps(self.cost, self.counters)
        self._next_step = 1

    # -- arrivals and departures -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.parked)

    @property
    def num_uncached_tokens(self) -> int:
        """Prompt tokens that the running, the waiting and the parked still have to compute, as far as is known."""
        return self.queues.num_uncached_tokens

    def take_feature_changes(self) -> tuple[list[ItemKey], list[ItemKey]]:
        """Items whose features were completed, and dropped, in the plans since the last call."""
        return self._prefill.report_changes()

    @property
    def running(self) -> list[Sequence]:
        """Admitted sequences, oldest first."""
        return self.queues.running

    @property
    def waiting(self) -> list[Sequence]:
        return self.queues.waiting

    @property
    def parked(self) -> list[Sequence]:
        return self.queues.parked

    @property
    def num_launched(self) -> int:
        return len(self._launched)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Take the samples of one request. Raises BadRequest, with the arithmetic, when it can never run."""
        arrived = list(sequences)
        self._admission.refuse_impossible(arrived[0])
        for sequence in arrived:
            sequence.max_outputs = self._admission.max_outputs(sequence)
            if len(arrived) > 1:
                self._residency.add_fork_point(sequence)
            self._admission.enqueue(sequence)

    def end(
        self,
        sequence: Sequence,
        reason: str,
        error: PrismError | None = None,
        stop_reason: str | int | None = None,
    ) -> None:
        """End a sequence in any phase; its pages, pins, places in queues and staged media are given back once."""
        if sequence.phase is Phase.FINISHED:
            return
        if sequence.phase is Phase.PARKED:
            self.in_flight.leave(sequence)
            self.parked.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self._leave_device(sequence)
        self.desk.forget(sequence)
        sequence.phase = Phase.FINISHED
        self._outcomes.append(Finished(sequence, reason, stop_reason, error))

    def media_arrived(self, key: ItemKey, decoded: bool, now_s: float) -> None:
        """The executor has an item's patches; `decoded`: a worker had to make them for this call."""
        waiting = self.desk.arrived(key)
        if decoded and waiting:
            waiting[0].decoded_items += 1
        self.counters["decoded_items"] += decoded
        for sequence in waiting:
            sequence.media_ready_s = now_s
            if sequence.phase is Phase.MEDIA and not sequence.wanted:
                sequence.phase = Phase.PREFILL

    def media_failed(self, key: ItemKey, error: PrismError) -> None:
        """An item cannot be prepared: those that asked for it fail."""
        for sequence in self.desk.failed(key):
            sequence.wanted.pop(key, None)
            self.end(sequence, "error", error)

    def take_abandoned_media(self) -> list[ItemKey]:
        """Items in preparation that nobody waits for any more; to be taken before the requests."""
        return self.desk.take_abandoned()

    def take_media_requests(self) -> list[MediaRequest]:
        return self.desk.take_requests()

    def take_outcomes(self) -> list[Outcome]:
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None when nothing can be done before media arrive or launched steps complete."""
        builder = PlanBuilder(self._next_step)
        self._finish_swaps()
        decoding = [sequence for sequence in self.running if sequence.phase is Phase.DECODE]
        budget = self.cost.budget(len(decoding))
        self._plan_running(builder, budget, decoding, now_s)
        if not builder.short_of_pages:
            for sequence in self._admission.admit(builder, now_s, is_idle=not self._launched):
                if sequence.phase is Phase.PREFILL:
                    self.plan_chunk(builder, budget, sequence)
            self._plan_leaders_without_media(builder, budget)
        if not builder.computes and not self._launched:
            self._break_jam(builder, budget)
        return None if builder.is_empty else self._launch(builder)

    def _plan_running(self, builder: PlanBuilder, budget: StepBudget, decoding: list[Sequence], now_s: float) -> None:
        """Decodes, then prefills: least work first unless they have waited. A starved oldest goes before all."""
        oldest = self.queues.oldest_runnable()
        if oldest is not None and oldest.starved and oldest.phase is Phase.PREFILL:
            self.plan_chunk(builder, budget, oldest)
        for sequence in decoding:
            self._plan_decode(builder, sequence)
        prefilling = [sequence for sequence in self.running if sequence.phase is Phase.PREFILL]
        prefilling.sort(key=lambda s: self._admission.priority(s, s.remaining_prefill, now_s))
        for place, sequence in enumerate(prefilling, 1):
            if sequence.phase is Phase.PREFILL and sequence.number not in builder.planned:
                self.plan_chunk(builder, budget, sequence, behind=prefilling[place:])

    def _plan_leaders_without_media(self, builder: PlanBuilder, budget: StepBudget) -> None:
        """A sequence that waits for its media, a clip for seconds, computes the text before them if others wait for no
        more than that. It stays in that phase: no encoder output is held for it meanwhile."""
        for sequence, rows in self.in_flight.awaited_rows().items():
            text_rows = sequence.rows_before_media
            can_go_on = sequence.phase is Phase.MEDIA and sequence.num_planned < rows <= text_rows
            if can_go_on and sequence.number not in builder.planned:
                self.plan_chunk(builder, budget, sequence, until=text_rows)

    def _plan_decode(self, builder: PlanBuilder, sequence: Sequence) -> None:
        if sequence.phase is not Phase.DECODE or not sequence.has_row_to_decode:
            return
        end = sequence.num_planned + 1
        if self.try_grow(builder, sequence, end, may_preempt=True):
            builder.add_decode(sequence)

    def plan_chunk(
        self,
        builder: PlanBuilder,
        budget: StepBudget,
        sequence: Sequence,
        behind: Iterable[Sequence] = (),
        until: int | None = None,
    ) -> None:
        """As many rows of a prefill as the budget, the pages and the encoder allow; the last one draws a token.

        `behind`: prefills that come after it in this step. `until`: no rows from there on.
        """
        start, is_oldest = sequence.num_planned, sequence is self.queues.oldest_runnable()
        most_rows = sequence.num_prefill if until is None else until
        end = min(most_rows, start + self._chunk_tokens(budget, sequence, behind))
        if end <= start:
            return
        end = min(end, max(self._residency.rows_that_fit(sequence), start + is_oldest))
        if end <= start or not self.try_grow(builder, sequence, end, may_preempt=is_oldest):
            builder.short_of_pages = True
            sequence.starved = is_oldest
            if not is_oldest:
                self._prefill.lose_pins(sequence)
            return
        end = self._prefill.plan_media(builder, budget, sequence, end)
        end = min(end, start + budget.chunk_tokens)  # the encoder has taken its part of the step's time
        if sequence.wanted:
            sequence.phase = Phase.MEDIA
        if end > start:
            self._add_chunk(builder, budget, sequence, end)

    def _chunk_tokens(self, budget: StepBudget, sequence: Sequence, behind: Iterable[Sequence]) -> int:
        """Rows that the sequence's chunk may have; it leaves room, up to half, for shorter ones behind or waiting."""
        affordable = min(budget.chunk_tokens, self.limits.chunk_tokens or 1 << 30)
        if affordable < 2:
            return affordable
        work = sequence.remaining_prefill
        shorter = sum(other.remaining_prefill for other in behind if other.remaining_prefill < work)
        return affordable - min(shorter + self._admission.hot_tokens(work), affordable // 2)

    def _add_chunk(self, builder: PlanBuilder, budget: StepBudget, sequence: Sequence, end: int) -> None:
        start = sequence.num_planned
        budget.take_tokens(end - start)
        self.counters["prefilled_media_tokens"] += sequence.media_tokens_in(start, end)
        self.counters["prefilled_tokens"] += end - start
        sequence.count_prefill(end)
        completes = end == sequence.num_prefill
        builder.add_rows(sequence, end, draws=completes)
        self._prefill.unpin_passed(builder, sequence)
        sequence.starved = False
        if completes:
            sequence.phase = Phase.DECODE

    def try_grow(self, builder: PlanBuilder, sequence: Sequence, rows: int, may_preempt: bool) -> bool:
        """Pages for `rows` rows, taken from younger sequences when that is allowed and nothing frees itself soon."""
        while not self._residency.try_grow(builder, sequence, rows):
            builder.short_of_pages = True
            victim = self.queues.youngest_victim(builder, sequence) if may_preempt else None
            if victim is None or (self._launched and self.kv.is_waiting_for_steps()):
                return False
            self.preempt(victim)
        return True

    def _launch(self, builder: PlanBuilder) -> StepPlan:
        builder.swap_out += self.kv.back_up_cold(builder.step)
        self.counters["swapped_out_pages"] += len(builder.swap_out)
        self.counters["swapped_in_pages"] += len(builder.swap_in)
        for key, number in builder.unpins:
            self.features.unpin(key, number)
        plan = builder.build(self._prefill.take_dropped_features(), self.desk.take_dropped())
        self._launched.add(builder, self._prefill.patch_blocks(builder))
        self._next_step += 1
        return plan

    def _break_jam(self, builder: PlanBuilder, budget: StepBudget) -> None:
        """Nothing runs and nothing could be planned: the oldest runnable takes what the others hold, one by one."""
        while not builder.computes:
            oldest = self.queues.oldest_runnable()
            if oldest is None:
                return
            if oldest.phase is Phase.DECODE:
                self._plan_decode(builder, oldest)
            else:
                self.plan_chunk(builder, budget, oldest)
            if builder.computes or oldest.phase is Phase.MEDIA:
                continue
            others = [sequence for sequence in reversed(self.running) if sequence is not oldest]
            pinned = next((other for other in others if self.features.pinned_by(other.number)), None)
            if pinned is not None:
                self._prefill.lose_pins(pinned)
            elif others:
                self.preempt(others[0])
            elif builder.is_empty:
                raise EngineFault(f"sequence {oldest.number} cannot go on, alone, in an empty engine")
            else:
                return  # a page that it needs is read by this plan's own copies: the next step has it

    # -- completion --------------------------------------------------------------------------------------------------

    def complete(self, result: StepResult, now_s: float) -> None:
        """The oldest launched step has completed. Outcomes are fetched with `take_outcomes`."""
        launched = self._launched.complete(result)
        self.kv.complete(result.step)
        for sequence in launched.encodes_for:
            sequence.encode_ms += result.encode_ms
        for item, error in result.failed_items.items():
            self._fail_item(item, error, launched)
        draws = iter(zip(result.token_ids, result.logprobs, strict=True))
        for rows in launched.rows:
            drawn = next(draws) if rows.draws else None
            sequence = rows.sequence
            if sequence.incarnation != rows.incarnation or sequence.phase is Phase.FINISHED:
                continue  # it ended or was preempted meanwhile: what this step made of it is surplus
            sequence.num_computed = rows.end
            for key in self._residency.publish(sequence):
                self.requeue(self.in_flight.published(key))
            if drawn is not None:
                self._accept(sequence, *drawn, now_s)

    def _accept(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None, now_s: float) -> None:
        sequence.outputs.append(token_id)
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
        self.counters["generated_tokens"] += 1
        self._outcomes.append(Drawn(sequence, token_id, logprob))
        params, count = sequence.request.params, len(sequence.outputs)
        if count >= params.min_tokens:
            if not params.ignore_eos and token_id in self.limits.eos_token_ids:
                return self.end(sequence, "stop")
            if token_id in params.stop_token_ids:
                return self.end(sequence, "stop", stop_reason=token_id)
        if count >= sequence.max_outputs:
            return self.end(sequence, "length")
        return None

    def _fail_item(self, key: ItemKey, error: PrismError, launched: LaunchedStep) -> None:
        plans = (launched, *self._launched)
        showing = {rows.sequence.number for plan in plans for rows in plan.rows if key in rows.items}
        if self.features.blocks_done(key) is not None:
            self.features.drop(key)
        for sequence in tuple(self.running):
            if sequence.number in showing or key in sequence.pins:
                self.end(sequence, "error", error)

    # -- phases ------------------------------------------------------------------------------------------------------

    def requeue(self, woken: Iterable[Sequence]) -> None:
        """What they were parked on can be found now, or is theirs to compute."""
        for sequence in woken:
            self.parked.remove(sequence)
            self._admission.enqueue(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence off the device; its computed rows stay findable and it waits to come back."""
        self._residency.publish_tail(sequence)
        self._leave_device(sequence)
        sequence.num_drawn = len(sequence.outputs)
        sequence.preemptions += 1
        self.counters["preemptions"] += 1
        self._admission.enqueue(sequence)

    def _leave_device(self, sequence: Sequence) -> None:
        self._residency.leave(sequence)
        self._prefill.leave(sequence)
        self.requeue(self.in_flight.release(sequence))
        self.running.remove(sequence)
        self._admission.give_slot_back(sequence)
        sequence.incarnation += 1
        sequence.ready_step = 0

    def _finish_swaps(self) -> None:
        for sequence in self.running:
            if sequence.phase is Phase.SWAPPING and sequence.ready_step <= self.kv.pool.completed_step:
                sequence.phase = Phase.MEDIA if sequence.wanted else Phase.PREFILL

    # -- checking ----------------------------------------------------------------------------------------------------

    def forget_idle_caches(self) -> None:
        """Forget every cached prefix and feature that no sequence uses."""
        self.kv.index.clear()
        self.features.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, pins, queues and phases agree."""
        self.kv.check_integrity()
        self.features.check_integrity()
        self.in_flight.check_integrity()
        self.queues.check_integrity()
        assert all(map(self.desk.is_staged, self.features.half_encoded())), "what is half encoded has lost its pixels"
        live = sum(len(sequence.table) for sequence in self.running)
        entries = sum(node.page is not None for node in self.kv.index.nodes())
        held = sum(self.kv.pool.references(page) for page in range(self.kv.pool.num_pages))
        assert held == live + entries, f"{held} references, {live} in tables, {entries} in the index"
