"""The bridge between the engine's thread and the event loop: one hand-over a step, one queue a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prism_server.engine.messages import (
    Accepted,
    CacheChanged,
    Event,
    GenerateRequest,
    RequestFailed,
    RequestFinished,
    SampleFinished,
    TokenDelta,
    Usage,
)
from prism_server.errors import PrismError
from prism_server.serving.cache_journal import CacheJournal
from prism_server.serving.http_errors import NotReady
from prism_server.serving.metrics import Metrics, RequestClock

if TYPE_CHECKING:
    from prism_server.engine.engine import Engine  # imports torch, long after the ports must answer


class RequestEvents:
    """The events of one request, in order, as many at a time as have come; within `nudged`, none at all where nothing
    has come for a while. Ends after RequestFinished; raises the error of RequestFailed.

    A deadline that passes before the first token is an error too: an empty answer would say something else.
    """

    def __init__(self, clock: RequestClock) -> None:
        self._events: list[Event] = []
        self._wake: asyncio.Future[None] | None = None
        """Of the one coroutine that reads, while it waits. (asyncio.Queue costs three times as much an event.)"""
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._taken_s = self._loop.time()
        self.has_ended = False
        """Whether the engine is done with the request, read or not."""
        self.usage = Usage(0)
        """As far as it is known."""

    def put(self, event: Event) -> None:
        self._clock.observe(event)
        self._events.append(event)
        if type(event) is not TokenDelta:
            self.has_ended = self.has_ended or isinstance(event, RequestFinished | RequestFailed)
            if isinstance(event, Accepted | RequestFinished):
                self.usage = event.usage
        self._wake_reader()

    @contextmanager
    def nudged(self, every_s: float) -> Iterator[None]:
        """Within the block who reads gets an empty list when nothing has come for `every_s`. One timer for all of it,
        so that a token costs no timer."""
        self._timer = self._loop.call_later(every_s, self._look, every_s)
        try:
            yield
        finally:
            self._timer.cancel()

    def _look(self, every_s: float) -> None:
        now_s, due_s = self._loop.time(), self._taken_s + every_s
        if now_s >= due_s:
            self._wake_reader()
            due_s = now_s + every_s
        self._timer = self._loop.call_at(due_s, self._look, every_s)

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def __aiter__(self) -> AsyncIterator[list[Event]]:
        has_token = False
        while True:
            for i, event in enumerate(events := await self._take()):
                match event:
                    case TokenDelta():
                        has_token = True
                    case RequestFailed(error=error):
                        if i:
                            yield events[:i]
                        raise error
                    case SampleFinished(reason="deadline") if not has_token:
                        raise NotReady("the request's deadline passed before its first token", "deadline_exceeded")
                    case _:
                        pass
            yield events
            if events and isinstance(events[-1], RequestFinished):
                return

    async def _take(self) -> list[Event]:
        """All events that have come; waits for one, or for the nudge."""
        if not self._events:
            self._wake = self._loop.create_future()
            await self._wake
            self._wake = None
        self._taken_s = self._loop.time()
        events, self._events = self._events, []
        return events


class Dispatcher:
    """Everything but `on_events` belongs to the event loop."""

    def __init__(self, engine: Engine, journal: CacheJournal, metrics: Metrics) -> None:
        self._engine = engine
        self._journal = journal
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, RequestEvents] = {}

    def on_events(self, events: Sequence[Event]) -> None:
        """Called by the engine's thread once a step: wakes the loop once, however many streams the step fed."""
        self._loop.call_soon_threadsafe(self._route, tuple(events))

    def _route(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, CacheChanged):
                self._journal.record(event)
            elif (stream := self._open.get(event.request_id)) is not None:
                stream.put(event)

    @contextmanager
    def run(self, request: GenerateRequest) -> Iterator[RequestEvents]:
        """Submits the request; leaving the block before its end cancels it. Raises Overloaded or EngineFault."""
        stream = RequestEvents(self._metrics.clock(request))
        self._open[request.request_id] = stream
        try:
            self._engine.submit(request)
            try:
                yield stream
            finally:
                if not stream.has_ended:
                    self._engine.cancel(request.request_id)
                    self._metrics.cancelled()
        finally:
            del self._open[request.request_id]

    def fail_all(self, error: PrismError) -> None:
        """Ends every open request with `error`."""
        for request_id, stream in self._open.items():
            if not stream.has_ended:
                self._engine.cancel(request_id)
                stream.put(RequestFailed(request_id, error))
