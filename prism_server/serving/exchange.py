"""One HTTP request being answered: one coroutine from the body to the last byte, cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from prism_server.engine.messages import Accepted, Event, GenerateRequest, Usage
from prism_server.errors import BadRequest, PrismError
from prism_server.http.asgi import ClientLeft, Receive, Scope, Send, header, read_body
from prism_server.http.headers import ROUTER
from prism_server.http.sse import COMMENT
from prism_server.identity import link_digest
from prism_server.media.link import NamedLink
from prism_server.serving.answers import Collected, Sample
from prism_server.serving.body import Body
from prism_server.serving.client import until_client_leaves
from prism_server.serving.dispatch import RequestEvents
from prism_server.serving.early_media import EarlyMedia, take_media_out
from prism_server.serving.http_errors import json_response, note_refusal
from prism_server.serving.prepare import Draft
from prism_server.serving.request_log import CLIENT_LEFT, line_of
from prism_server.serving.schema import Fields, parse_body
from prism_server.serving.services import Running, Services
from prism_server.serving.sse import COMMENT_EVERY_S, event_stream, raw_send

Result = TypeVar("Result")
FEW_LOGPROBS = 64
"""Tokens whose alternatives are written out in a millisecond or two."""


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
    body: Body = field(repr=False)
    scope: Scope = field(repr=False)
    receive: Receive = field(repr=False)
    send: Send = field(repr=False)
    arrival_s: float = 0.0
    reuse: dict[str, str] | None = None
    """Headers of a collected answer."""

    async def in_worker(self, work: Callable[[], Result]) -> Result:
        """Runs blocking `work` in the preparation threads, in the request's context: what is logged there has its id.
        A cancelled wait leaves the thread to finish alone."""
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(self.services.workers, run, work)

    async def prepared(
        self, kind: type[Fields], build: Callable[[Fields, EarlyMedia], tuple[Result, Draft]]
    ) -> tuple[Result, GenerateRequest]:
        """The request that `build` drafts from the body's fields, and what else it says. Raises BadRequest, and what
        the server's life ends with.

        Links are fetched in between, on the event loop: no worker waits for them.
        """

        def read() -> tuple[Result, Draft, GenerateRequest | None]:
            result, draft = self._read(kind, build)
            return result, draft, None if draft.links else draft.finish({})

        async with self.services.lifecycle.before_engine():
            result, draft, request = await self.in_worker(read)
            if request is None:
                fetched = await self.services.fetcher.fetch_all(draft.links)
                request = await self.in_worker(lambda: draft.finish(fetched))
                self._report_links(draft.links, request)
        return result, request

    def _report_links(self, links: Sequence[NamedLink], request: GenerateRequest) -> None:
        """Tells routers what the links led to."""
        contents = {span.media_index: span.facts.key.content_id for span in request.prompt.spans}
        for link in links:
            if link.media_index is not None:
                self.services.journal.record_link(link_digest(link.url), contents[link.media_index])

    def _read(self, kind: type[Fields], build: Callable[[Fields, EarlyMedia], Result]) -> Result:
        """What `build` makes of the body's fields; unknown ones are counted. Blocking, once. Raises BadRequest.

        Media are taken out first. If that leaves anything unread, or anything is wrong, the whole body is read again
        as it came: what it says is then said about the client's own words.
        """
        body = self.body.take()  # tens of megabytes that nobody needs while the answer streams
        json, early = take_media_out(body, self.running.engine.media.limits)
        if early.bytes_of:
            with contextlib.suppress(BadRequest):
                parsed = parse_body(json, kind)
                built = build(parsed.fields, early)
                if early.all_taken:
                    self.services.metrics.unknown_fields(parsed.unknown)
                    return built
        parsed = parse_body(body, kind)
        self.services.metrics.unknown_fields(parsed.unknown)
        return build(parsed.fields, EarlyMedia())

    async def collect(self, request: GenerateRequest) -> Collected:
        """Runs the request to its end. Raises its error."""
        collected = Collected([Sample() for _ in range(request.params.n)])
        with self._run(request) as events:
            async for batch in events:
                self._let_go_of_body(batch)
                for event in batch:
                    collected.take(event)
        self.reuse = reuse_headers(collected.usage)
        return collected

    @contextlib.contextmanager
    def _run(self, request: GenerateRequest) -> Iterator[RequestEvents]:
        """The request in the engine; the log learns what it has cost so far."""
        line = line_of(self.scope)
        line.engine_id = request.request_id
        with self.running.dispatcher.run(request) as run:
            try:
                yield run
            finally:
                line.usage = run.usage

    async def send_whole(self, collected: Collected, build: Callable[[], Any]) -> None:
        """The JSON that `build` makes of the answer; in a worker where that takes long, so that other streams go on."""

        def respond() -> Response:
            return json_response(build(), headers=self.reuse)

        response = await self.in_worker(respond) if collected.num_logprobs > FEW_LOGPROBS else respond()
        await response(self.scope, self.receive, self.send)

    async def send_stream(self, request: GenerateRequest, writer: StreamWriter) -> None:
        """Streams the answer. Nothing is sent before the engine shows that it can answer (its first token): whatever
        goes wrong until then, half a JPEG included, is an ordinary HTTP error. Unless it takes so long that a comment
        has to keep the connection: who waits then has a stream, and is told of errors in it."""
        with self._run(request) as run, self._comments(run):
            batches = aiter(run)
            held = await _until_first_result(batches)
            self._let_go_of_body(held)
            async with event_stream(self.send, raw_send(self.scope), _reuse_of(held)) as send:
                try:
                    await send(b"".join(map(writer.frames, held)) or COMMENT)
                    async for batch in batches:
                        self._let_go_of_body(batch)
                        await send(b"".join(map(writer.frames, batch)) if batch else COMMENT)
                except PrismError as error:
                    note_refusal(self.scope, self.services.metrics, error)
                    await send(writer.failure(error))

    def _let_go_of_body(self, batch: Sequence[Event]) -> None:
        """With the first result: then the engine has let go of the media, too."""
        if self.body.is_counted and _has_result(batch):
            self.body.let_go()

    def _comments(self, run: RequestEvents) -> contextlib.AbstractContextManager[None]:
        """Nothing where a router stands before us: see the header."""
        if header(self.scope, ROUTER) is not None:
            return contextlib.nullcontext()
        return run.nudged(COMMENT_EVERY_S)


def reuse_headers(usage: Usage) -> dict[str, str]:
    """What routers count as real hits: known before the first byte, whatever form the answer has."""
    return {
        "x-prism-cached-tokens": str(usage.cached_tokens),
        "x-prism-prompt-tokens": str(usage.prompt_tokens),
    }


def _reuse_of(held: Sequence[Event]) -> list[tuple[bytes, bytes]]:
    accepted = (event.usage for event in held if isinstance(event, Accepted))
    return [(name.encode(), value.encode()) for usage in accepted for name, value in reuse_headers(usage).items()]


async def _until_first_result(batches: AsyncIterator[list[Event]]) -> list[Event]:
    held: list[Event] = []
    async for batch in batches:
        held += batch
        if not batch or _has_result(batch):
            break
    return held


def _has_result(batch: Sequence[Event]) -> bool:
    """More than that the request was accepted."""
    return not all(isinstance(event, Accepted) for event in batch)


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
            body = Body(services.bodies)
            exchange = Exchange(services, services.running(), body, scope, receive, send, arrival_s)
            try:
                async with services.lifecycle.before_engine():
                    await self._read(body, scope, receive)
                has_stayed = await until_client_leaves(receive, self._handler(exchange))
            except ClientLeft:
                has_stayed = False
            finally:
                body.let_go()
            if not has_stayed:
                line_of(scope).end = CLIENT_LEFT

    async def _read(self, body: Body, scope: Scope, receive: Receive) -> None:
        """Raises BadRequest, Overloaded and ClientLeft."""
        http = self._services.settings.http
        try:
            async with asyncio.timeout(http.request_timeout_s):
                await read_body(scope, receive, http.max_body_bytes, body.add)
        except TimeoutError:
            reason = f"the body did not come within {http.request_timeout_s:g} s"
            raise BadRequest(reason, status=408, code="request_timeout") from None
