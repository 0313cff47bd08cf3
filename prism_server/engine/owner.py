"""The owner: the one thread that touches scheduler and device. Take commands, plan, launch, finish the step before."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from prism_server.engine.answers import Answers
from prism_server.engine.executor import Executor, StepHandle
from prism_server.engine.messages import CacheChanged, EngineStats, Event, GenerateRequest, RequestFailed
from prism_server.engine.pacing import Pacing
from prism_server.engine.plan import StepPlan
from prism_server.engine.scheduler import Scheduler
from prism_server.engine.sequence import Sequence as Sample
from prism_server.engine.staging import StagedItem
from prism_server.errors import BadRequest, EngineFault, Overloaded, PrismError
from prism_server.identity import Digest
from prism_server.media.cache import Materialised, media_failed
from prism_server.media.item import ItemKey
from prism_server.media.pipeline import MediaPipeline

logger = logging.getLogger(__name__)

DEADLINE_CHECK_S = 0.05
"""How often deadlines are looked at while nothing else wakes the owner."""
MOST_OWN_COPY_BYTES = 1 << 20
"""Patches up to this the owner copies itself, within 0.2 ms; a clip of 72 MiB takes some 50 ms."""


@dataclass(frozen=True, slots=True)
class Submit:
    request: GenerateRequest
    seed: int


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class MediaDone:
    """A worker's answer: patches or an error."""

    key: ItemKey
    future: Future[Materialised]
    item: StagedItem | PrismError | None
    """The patches, ready for the executor, or why they are not; None where there are no patches."""


@dataclass(frozen=True, slots=True)
class ForgetCaches:
    pass


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Submit | Cancel | MediaDone | ForgetCaches | Stop


class MediumNotCopied(Overloaded):
    """Patches that cannot be copied to where the device takes them from: pinned memory, of which there is too little.
    Nothing is wrong with the engine, and another one may have the room. HTTP 429."""

    code = "medium_not_copied"

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"there is no room now to copy a medium for the device: {cause}")


class Owner:
    """Runs the loop. `depth` steps are in flight while the next is planned: 1 overlaps; 0 is the plain loop."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, media: MediaPipeline, answers: Answers, depth: int
    ) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._media, self._answers = media, answers
        self._depth = depth
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="prism-owner", daemon=True)
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._pacing = Pacing()
        self._preparing: dict[ItemKey, Future[Materialised]] = {}
        self._events: list[Event] = []
        self._on_events: Callable[[Sequence[Event]], None] = lambda events: None
        self._next_number = 0
        self._next_deadline_check_s = 0.0
        self._stopping = False
        self._gate = threading.Lock()
        self._ended: EngineFault | None = None
        self._held_contents: Counter[Digest] = Counter()
        self.fault: EngineFault | None = None
        self.turn_began_s: float | None = None
        """Of the monotonic clock; None while the owner sleeps. Any thread may read it."""
        self.stats = self._snapshot()

    # -- any thread --------------------------------------------------------------------------------------------------

    def start(self, on_events: Callable[[Sequence[Event]], None]) -> None:
        self._on_events = on_events
        self._thread.start()

    def send(self, command: Command) -> None:
        """Put a command into the inbox. A request for an owner that has ended raises EngineFault instead."""
        with self._gate:
            if self._ended is not None and isinstance(command, Submit):
                raise EngineFault(self._ended.reason)
            self._inbox.put(command)

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended, waiting for it no longer than `timeout_s`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- the owner's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        idle = True
        try:
            while not self._stopping:
                self._take_commands(wait=idle)
                plan = self._scheduler.schedule(time.monotonic())
                self._ask_for_media()
                if plan is not None:
                    self._launch(plan)
                if len(self._in_flight) > (self._depth if plan is not None else 0):
                    self._complete_oldest()
                idle = plan is None and not self._in_flight
                self._hand_over()
        except Exception as error:
            logger.exception("the engine stopped")
            self._die(EngineFault(f"the engine stopped: {type(error).__name__}: {error}"))
        else:
            self._die(EngineFault("the engine has been stopped"), is_fault=False)

    def _launch(self, plan: StepPlan) -> None:
        self._in_flight.append((plan, self._executor.launch(plan)))
        if self.turn_began_s is not None:
            self._pacing.launched(time.monotonic() - self.turn_began_s)

    def _complete_oldest(self) -> None:
        plan, handle = self._in_flight.popleft()
        asked_s = time.monotonic()
        result, now_s = handle.wait(), time.monotonic()
        if self._executor.repeats_itself:
            following = self._in_flight[0][0] if self._in_flight else None
            self._pacing.step_over(now_s, now_s - asked_s, plan, result, following)
        self._scheduler.complete(result, now_s)

    def _take_commands(self, wait: bool) -> None:
        """Everything in the inbox; sleeps on it after a turn that found nothing to run."""
        if not wait:
            self._linger()
        first = self._sleep() if wait else None
        self.turn_began_s = time.monotonic()
        if first is not None:
            self._obey(first)
        while not self._inbox.empty():
            self._obey(self._inbox.get())
        self._end_late_requests()

    def _linger(self) -> None:
        """Obey what comes before the next step must be planned."""
        while not self._stopping and (left_s := self._pacing.lingers_for_s(time.monotonic())) > 0:
            with contextlib.suppress(queue.Empty):
                self._obey(self._inbox.get(timeout=left_s))

    def _sleep(self) -> Command | None:
        """The next command; None where a deadline may pass before one comes."""
        self.turn_began_s = None
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=DEADLINE_CHECK_S if self._scheduler.has_work else None)
        return None

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Cancel():
                for sequence in self._answers.sequences_of(command.request_id):
                    self._scheduler.end(sequence, "cancelled")
                    self._scheduler.counters["cancelled"] += 1
            case MediaDone():
                self._media_done(command)
            case ForgetCaches():
                self._scheduler.forget_idle_caches()
            case Stop():
                self._stopping = True

    def _submit(self, command: Submit) -> None:
        request = command.request
        sequences = [
            Sample(self._next_number + i, request, i, command.seed + i, request.params.max_tokens)
            for i in range(request.params.n)
        ]
        self._next_number += len(sequences)
        self._answers.open(request, sequences)
        try:
            self._scheduler.add(sequences)
        except BadRequest as error:
            self._answers.close(request.request_id)
            self._events.append(RequestFailed(request.request_id, error))

    def _ask_for_media(self) -> None:
        for key in self._scheduler.take_abandoned_media():
            if (unwanted := self._preparing.pop(key, None)) is not None:
                unwanted.cancel()  # a worker stops where it can: a clip within a frame
        for wanted in self._scheduler.take_media_requests():
            future = self._media.materialise(wanted.item, wanted.facts)
            self._preparing[wanted.facts.key] = future
            future.add_done_callback(partial(self._media_is_done, wanted.facts.key))

    def _media_is_done(self, key: ItemKey, future: Future[Materialised]) -> None:
        """Called by the media worker that has prepared the patches, or by the owner where they were there already: it
        leaves large ones to a worker all the same."""
        copy = partial(self._copy_patches, key, future)
        if threading.current_thread() is self._thread and _num_bytes(future) > MOST_OWN_COPY_BYTES:
            self._media.hand_to_worker(copy)
        else:
            copy()

    def _copy_patches(self, key: ItemKey, future: Future[Materialised]) -> None:
        """What is raised here nobody would hear of."""
        item: StagedItem | PrismError | None = None
        if not future.cancelled() and future.exception() is None:
            try:
                item = self._executor.prepare(future.result().patches)
            except (MemoryError, RuntimeError) as error:  # RuntimeError: what torch raises where there is no memory
                logger.error("a medium could not be copied for the device", exc_info=error)
                item = MediumNotCopied(error)
            except Exception as error:
                item = media_failed(key, error)
        self.send(MediaDone(key, future, item))

    def _media_done(self, done: MediaDone) -> None:
        if self._preparing.get(done.key) is not done.future:
            return  # nobody waits for it any more
        del self._preparing[done.key]
        try:
            ready = done.future.result()
        except PrismError as error:
            self._scheduler.media_failed(done.key, error)
        else:
            if isinstance(done.item, PrismError):
                self._scheduler.media_failed(done.key, done.item)
            elif done.item is not None:
                self._executor.stage(done.key, done.item)
                self._scheduler.media_arrived(done.key, ready.decoded, time.monotonic())

    def _end_late_requests(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_deadline_check_s:
            self._next_deadline_check_s = now_s + DEADLINE_CHECK_S
            for sequence in self._answers.past_deadline(now_s):
                self._scheduler.end(sequence, "deadline")

    def _hand_over(self) -> None:
        """All events of this turn, at once."""
        self._events += self._answers.take_events(time.monotonic())
        changed = self._cache_changes()
        if changed is not None:
            self._events.append(changed)
        self.stats = self._snapshot()
        if self._events:
            events, self._events = self._events, []
            self._on_events(events)

    def _cache_changes(self) -> CacheChanged | None:
        added, evicted = self._scheduler.kv.index.take_events()
        completed, dropped = self._scheduler.take_feature_changes()
        if not (added or evicted or completed or dropped):
            return None
        return CacheChanged(added, evicted, *self._content_changes(completed, dropped))

    def _content_changes(
        self, completed: list[ItemKey], dropped: list[ItemKey]
    ) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
        """Contents that are held now and were not, and the other way; one content may be held in several layouts."""
        held = self._held_contents
        touched = {key.content_id: held[key.content_id] for key in (*completed, *dropped)}
        held.update(key.content_id for key in completed)
        held.subtract(key.content_id for key in dropped)
        added = tuple(content for content, before in touched.items() if not before and held[content])
        evicted = tuple(content for content, before in touched.items() if before and not held[content])
        for content in touched:
            if not held[content]:
                del held[content]
        return added, evicted

    def _snapshot(self) -> EngineStats:
        scheduler, kv = self._scheduler, self._scheduler.kv
        return EngineStats(
            running_now=len(scheduler.running),
            waiting_now=len(scheduler.waiting) + len(scheduler.parked),
            uncached_tokens_now=scheduler.num_uncached_tokens,
            total_pages=kv.pool.num_pages,
            free_pages_now=kv.pool.num_free + kv.pool.num_retired,
            evictable_pages_now=kv.index.num_evictable,
            page_tokens=kv.page_tokens,
            host_slots_total=kv.host.num_pages,
            host_slots_used_now=kv.host.num_pages - kv.host.num_free,
            encoder_queue_now=scheduler.desk.num_pending + scheduler.desk.num_staged,
            feature_bytes_now=scheduler.features.used_bytes,
            feature_bytes_capacity=scheduler.features.capacity_bytes,
            ms_per_token=scheduler.cost.ms_per_token or None,
            ms_per_patch=scheduler.cost.ms_per_patch_block * scheduler.vision_blocks or None,
            steps=scheduler.counters["steps"],
            counters={
                **scheduler.counters,
                "evicted_pages": kv.index.evicted_pages,
                "feature_evictions": scheduler.features.evictions,
            },
        )

    def _die(self, fault: EngineFault, is_fault: bool = True) -> None:
        """Everyone who waits gets a last event."""
        with self._gate:
            self._ended = fault
        if is_fault:
            self.fault = fault
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, Submit):
                self._events.append(RequestFailed(command.request.request_id, fault))
        for future in self._preparing.values():
            future.cancel()  # the end does not wait for clips
        self._events += self._answers.fail_all(fault)
        if self._events:
            self._on_events(self._events)


def _num_bytes(future: Future[Materialised]) -> int:
    """Of the patches that it has; 0 without any."""
    return 0 if future.cancelled() or future.exception() else future.result().patches.num_bytes
