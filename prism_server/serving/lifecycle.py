"""The server's life: loading, ready, leaving, draining, faulted. Who is let in, and who is inside. Event loop only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

from prism_server.errors import Overloaded, PrismError
from prism_server.serving.http_errors import NotReady

Phase = Literal["loading", "ready", "leaving", "draining", "faulted"]


@dataclass
class Lifecycle:
    """`max_inside` bounds the requests between arrival and last byte, so that preparation cannot outgrow memory."""

    max_inside: int
    phase: Phase = "loading"
    reason: str = "the model is being loaded"
    stage: str = "starting"
    stage_done: int = 0
    stage_total: int = 0
    inside: int = 0
    started_s: float = field(default_factory=time.monotonic)
    ready_after_s: float | None = None
    _last_word: PrismError | None = None
    _early: set[asyncio.Timeout] = field(default_factory=set)
    """Of requests that the engine does not know of yet."""

    def progress(self, stage: str, done: int, total: int) -> None:
        self.stage, self.stage_done, self.stage_total = stage, done, total

    def ready(self) -> None:
        self.phase, self.reason = "ready", ""
        self.ready_after_s = time.monotonic() - self.started_s

    def leave(self) -> None:
        """Not ready any more, but whoever has not heard of it yet is still served: proxies and routers lag behind."""
        if self.phase == "ready":
            self.phase, self.reason = "leaving", "the server is about to drain"

    @property
    def is_going(self) -> bool:
        """Whether connections should not be kept."""
        return self.phase in ("leaving", "draining")

    def drain(self) -> None:
        """Nothing new is let in; those inside go on. A fault stays a fault."""
        if self.phase != "faulted":
            self.phase, self.reason = "draining", "the server is draining"

    def fault(self, reason: str) -> None:
        self.phase, self.reason = "faulted", reason

    def check_open(self) -> None:
        """Raises `NotReady` unless a request can be answered."""
        if self.phase not in ("ready", "leaving"):
            raise NotReady(self.reason, self.phase)

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request is inside the block. Raises `NotReady` or `Overloaded` at the door."""
        self.check_open()
        if self.inside >= self.max_inside:
            raise Overloaded(f"{self.inside} requests are being served or wait, the limit; try again later")
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    @asynccontextmanager
    async def before_engine(self) -> AsyncIterator[None]:
        """In the block the engine does not know of the request. Raises what `end` is told, at once when it is."""
        in_time = asyncio.timeout(None)
        self._early.add(in_time)
        try:
            async with in_time:
                self._check_not_over()
                yield
        except TimeoutError:
            if not in_time.expired():
                raise
        finally:
            self._early.discard(in_time)
        self._check_not_over()  # also where the block and the time ended together: the engine takes nobody any more

    def end(self, error: PrismError) -> None:
        """The server's time is over: who has not come to the engine is told `error`, now or when it would."""
        self._last_word = error
        now_s = asyncio.get_running_loop().time()
        for in_time in self._early:
            in_time.reschedule(now_s)

    def _check_not_over(self) -> None:
        if self._last_word is not None:
            raise self._last_word
