"""One HTTP request being answered: one coroutine from the body to the last byte, cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from prism_server.engine.messages import Accepted, Event, GenerateRequest
from prism_server.errors import PrismError
from prism_server.serving.answers import Collected, Sample
from prism_server.serving.client import read_body, until_client_leaves
from prism_server.serving.http_errors import json_response, refusal_reason
from prism_server.serving.schema import Fields, parse_body
from prism_server.serving.services import Running, Services
from prism_server.serving.sse import event_stream

Result = TypeVar("Result")


class StreamWriter(Protocol):
    """Turns a request's events into the frames of one wire format."""

    def frames(self, event: Event) -> bytes:
        """What `event` adds to the stream, perhaps nothing."""
        ...

    def failure(self, error: PrismError) -> bytes:
        """The error event and what ends the stream after it."""
        ...


@dataclass
class Exchange:
    """What a handler needs to answer one request."""

    services: Services
    running: Running
    body: Sequence[bytes] = field(repr=False)
    scope: Scope = field(repr=False)
    receive: Receive = field(repr=False)
    send: Send = field(repr=False)
    arrival_s: float = 0.0

    async def in_worker(self, work: Callable[[], Result]) -> Result:
        """Runs blocking `work` in the preparation threads. A cancelled wait leaves the thread to finish alone."""
        return await asyncio.get_running_loop().run_in_executor(self.services.workers, work)

    def parse(self, kind: type[Fields]) -> Fields:
        """The body as fields of `kind`; unknown ones are counted. Blocking, once. Raises BadRequest."""
        parsed = parse_body(b"".join(self.body), kind)
        self.body = ()  # tens of megabytes that nobody needs while the answer streams
        self.services.metrics.unknown_fields(parsed.unknown)
        return parsed.fields

    async def collect(self, request: GenerateRequest) -> Collected:
        """Runs the request to its end. Raises its error."""
        collected = Collected([Sample() for _ in range(request.params.n)])
        with self.running.dispatcher.run(request) as events:
            async for event in events:
                collected.take(event)
        return collected

    async def send_json(self, body: Any) -> None:
        await json_response(body)(self.scope, self.receive, self.send)

    async def send_stream(self, request: GenerateRequest, writer: StreamWriter) -> None:
        """Streams the answer. Nothing is sent before the engine shows that it can answer (its first token): whatever
        goes wrong until then, half a JPEG included, is an ordinary HTTP error."""
        with self.running.dispatcher.run(request) as run:
            events = aiter(run)
            held = await _until_first_result(events)
            async with event_stream(self.send) as send:
                try:
                    await send(b"".join(map(writer.frames, held)))
                    async for event in events:
                        await send(writer.frames(event))
                except PrismError as error:
                    self.services.metrics.refused(refusal_reason(error))
                    await send(writer.failure(error))


async def _until_first_result(events: AsyncIterator[Event]) -> list[Event]:
    held: list[Event] = []
    async for event in events:
        held.append(event)
        if not isinstance(event, Accepted):
            break
    return held


Handler = Callable[[Exchange], Coroutine[Any, Any, None]]


class Answering:
    """ASGI endpoint around a handler: lets the request in, reads its body, stops the handler if the client leaves."""

    def __init__(self, services: Services, handler: Handler) -> None:
        self._services = services
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services = self._services
        arrival_s = time.monotonic()
        with services.lifecycle.request():
            exchange = Exchange(services, services.running(), (), scope, receive, send, arrival_s)
            try:  # the exchange alone holds the body, so that it can let go of it
                exchange.body = await read_body(Request(scope, receive), services.settings.http.max_body_bytes)
            except ClientDisconnect:
                return
            await until_client_leaves(receive, self._handler(exchange))
