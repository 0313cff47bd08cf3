"""Engines for tests: built from settings by dotted names, and driven as serving drives them."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_server.capacity.page_layout import PageLayout
from prism_server.engine.engine import Engine
from prism_server.engine.messages import (
    Accepted,
    CacheChanged,
    Event,
    GenerateRequest,
    RequestFailed,
    RequestFinished,
    SampleFinished,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from prism_server.engine.plan import StepPlan
from prism_server.engine.sequence import Phase
from prism_server.errors import PrismError
from prism_server.media.item import MediaItem
from prism_server.media.messages import MediaContent, Message, TextContent
from prism_server.model.config import ModelConfig
from prism_server.prompt.encoded import EncodedPrompt
from prism_server.settings import ServerSettings

Parts = Sequence[str | bytes | MediaItem]
"""A user's message: text, and encoded pictures or media of any kind among it."""
PATIENCE_S = 120.0
PAGE_TOKENS = 16
"""Small pages, so that short prompts cross several of them."""


@dataclass
class Reply:
    """What came back for one request, by sample."""

    request_id: str
    prompt: EncodedPrompt
    samples: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of sample 0."""
    finishes: dict[int, SampleFinished] = field(default_factory=dict)
    accepted: Accepted | None = None
    ends: list[RequestFinished | RequestFailed] = field(default_factory=list)
    """Exactly one in the end."""
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)

    def take(self, event: Event) -> None:
        """Called on the owner's thread."""
        with self._changed:
            match event:
                case TokenDelta():
                    self.samples.setdefault(event.sample, []).extend(event.token_ids)
                    self.texts[event.sample] = self.texts.get(event.sample, "") + event.text
                    if event.sample == 0:
                        self.logprobs += event.logprobs
                case SampleFinished():
                    self.finishes[event.sample] = event
                case Accepted():
                    self.accepted = event
                case RequestFinished() | RequestFailed():
                    self.ends.append(event)
            self._changed.notify_all()

    def wait(self) -> Reply:
        """Until the last event."""
        return self.wait_for_tokens(None)

    def wait_for_tokens(self, count: int | None) -> Reply:
        """Until sample 0 has `count` tokens, or the request has ended."""

        def there() -> bool:
            return bool(self.ends) or (count is not None and len(self.tokens) >= count)

        with self._changed:
            if not self._changed.wait_for(there, PATIENCE_S):
                raise TimeoutError(f"request {self.request_id} has {self.tokens} after {PATIENCE_S} s")
        return self

    @property
    def tokens(self) -> list[int]:
        return self.samples.get(0, [])

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    @property
    def reason(self) -> str:
        return self.finishes[0].reason

    @property
    def usage(self) -> Usage:
        (end,) = self.ends
        if isinstance(end, RequestFailed):
            raise end.error
        return end.usage

    @property
    def error(self) -> PrismError | None:
        (end,) = self.ends
        return end.error if isinstance(end, RequestFailed) else None


class Driver:
    """A started engine and the replies of its requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.changes: list[CacheChanged] = []
        self._replies: dict[str, Reply] = {}
        self._numbers = itertools.count()
        engine.start(self._take)

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, CacheChanged):
                self.changes.append(event)
            else:
                self._replies[event.request_id].take(event)

    def prompt(self, parts: Parts) -> tuple[EncodedPrompt, tuple[MediaItem, ...]]:
        """Described, rendered and keyed, as before any request."""
        media = [MediaItem("image", part) if isinstance(part, bytes) else part for part in parts]
        items = tuple(part for part in media if isinstance(part, MediaItem))
        indices = itertools.count()
        contents = [
            TextContent(part) if isinstance(part, str) else MediaContent(next(indices), part.kind) for part in media
        ]
        facts = [self.engine.media.describe(item) for item in items]
        return self.engine.prompts.encode_chat([Message("user", tuple(contents))], facts, items), items

    def submit(self, parts: Parts, max_tokens: int = 12, deadline_s: float | None = None, **params: Any) -> Reply:
        """Send a request; `deadline_s` is counted from now."""
        prompt, media = self.prompt(parts)
        reply = Reply(f"request-{next(self._numbers)}", prompt)
        self._replies[reply.request_id] = reply
        now_s = time.monotonic()
        deadline_s = None if deadline_s is None else now_s + deadline_s
        sampling = SamplingParams(max_tokens, **params)
        self.engine.submit(GenerateRequest(reply.request_id, prompt, media, sampling, now_s, deadline_s))
        return reply

    def ask(self, parts: Parts, max_tokens: int = 12, **params: Any) -> Reply:
        return self.submit(parts, max_tokens, **params).wait()

    def ask_all(self, prompts: Sequence[Parts], max_tokens: int = 12, **params: Any) -> list[Reply]:
        """All at once: none has ended before the last has come, however slowly they are sent."""
        with self.held():
            replies = [self.submit(parts, max_tokens, **params) for parts in prompts]
        return [reply.wait() for reply in replies]

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No step is planned meanwhile."""
        scheduler, may_plan = self.engine._scheduler, threading.Event()
        schedule = scheduler.schedule

        def held_schedule(now_s: float) -> StepPlan | None:
            may_plan.wait(PATIENCE_S)
            return schedule(now_s)

        scheduler.schedule = held_schedule  # type: ignore[method-assign]
        try:
            yield
        finally:
            scheduler.schedule = schedule  # type: ignore[method-assign]
            may_plan.set()

    def cancel_in_phase(self, reply: Reply, phase: Phase) -> None:
        """As soon as the request is in that phase. The owner itself looks, after each turn, and obeys before the next:
        no phase is too short to be seen. To be called while the request is `held`."""
        owner, hand_over = self.engine._owner, self.engine._owner._hand_over

        def watched() -> None:
            hand_over()
            sequences = owner._answers.sequences_of(reply.request_id)
            if sequences and sequences[0].phase is phase:
                owner._hand_over = hand_over  # type: ignore[method-assign]
                for _ in range(2):  # the second finds nothing to end
                    self.engine.cancel(reply.request_id)

        owner._hand_over = watched  # type: ignore[method-assign]

    def counters(self) -> dict[str, int]:
        """When nothing runs any more."""
        self.settle()
        return self.engine.stats().counters

    def settle(self) -> None:
        """Until nothing runs or waits, no step of surplus rows is in flight, and the figures tell of all steps."""
        wait_until(lambda: self.engine.fault is not None or self._is_idle())

    def _is_idle(self) -> bool:
        ended = all(reply.ends for reply in self._replies.values())
        sleeps = self.engine.turn_began_s is None  # it has handed over what its last turn did
        stats, steps = self.engine.stats(), self.engine._scheduler.num_launched
        return ended and sleeps and stats.running_now == stats.waiting_now == steps == 0


def wait_until(holds: Callable[[], bool]) -> None:
    """For what stays so once it is so."""
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not so after {PATIENCE_S} s")
        time.sleep(0.002)


def settings_with(**dotted: Any) -> ServerSettings:
    """`settings_with(kv__dtype="fp32")`: two underscores stand for the dot. One thread, FP32 pages of 16 rows."""
    values = {"model__threads": 1, "kv__dtype": "fp32", "kv__page_tokens": PAGE_TOKENS, **dotted}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        group, option = name.split("__")
        groups.setdefault(group, {})[option] = value
    return ServerSettings.model_validate(groups)


def pool_bytes(num_pages: int, **dotted: Any) -> int:
    """`kv.memory_bytes` of a pool of so many pages, for the same settings."""
    return num_pages * page_layout(settings_with(**dotted)).page_bytes


def page_layout(settings: ServerSettings) -> PageLayout:
    config = ModelConfig.from_dir(settings.model.directory)
    return config.page_layout(settings.kv.page_tokens, settings.kv.dtype)


@contextlib.contextmanager
def running_engine(*, num_pages: int | None = None, **dotted: Any) -> Iterator[Driver]:
    """An engine of the demo model (or of `model__path`) that must be empty and whole when it is given back."""
    if num_pages is not None:
        dotted["kv__memory_bytes"] = pool_bytes(num_pages, **dotted)
    engine = Engine.build(settings_with(**dotted))
    driver = Driver(engine)
    try:
        yield driver
        driver.settle()
    finally:
        engine.stop()
    if engine.fault is None:
        check_empty(engine)


def check_empty(engine: Engine) -> None:
    """A stopped engine holds nothing of any request: only idle prefixes and features."""
    scheduler, kv = engine._scheduler, engine._scheduler.kv
    scheduler.check_integrity()
    assert scheduler.running == scheduler.waiting == scheduler.parked == []
    assert kv.pool.num_free + kv.pool.num_retired + kv.index.num_evictable == kv.pool.num_pages
    assert scheduler.desk.num_staged == scheduler.desk.num_pending == scheduler.in_flight.num_parked == 0
    assert engine._live_sequences == 0


def tokens_of(replies: Sequence[Reply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


def agreement(got: Sequence[Reply | Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """The share of equal tokens, each answer up to its first difference: what comes after it answers another text.

    For answers drawn at random: where the same row is computed in another batch or chunk, its logits differ in the last
    bits, and once in some hundred draws the number falls on the other side of a boundary between two tokens. Another
    number, or one of another sequence, changes nearly every token.
    """
    total = agreeing = 0
    for answer, other in zip(got, expected, strict=True):
        one = answer.tokens if isinstance(answer, Reply) else answer
        differing = (i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
        first = next(differing, min(len(one), len(other)))
        total += first + (first < max(len(one), len(other)))
        agreeing += first
    return agreeing / total


def alone(prompts: Sequence[Parts], max_tokens: int = 12, **params: Any) -> list[list[int]]:
    """The answers of an engine that is asked one thing at a time and remembers nothing."""
    with running_engine(kv__prefix_cache=False) as driver:
        return [driver.ask(parts, max_tokens, **params).tokens for parts in prompts]
