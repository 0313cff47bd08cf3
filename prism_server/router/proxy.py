"""One request on its way through the router: placed, tried, perhaps tried elsewhere, and streamed.

Another try is possible within the budget, never at the same pod, and not once two pods have failed at the request,
until a pod's first byte has gone to the client. From then on a fault ends the stream with an error event. One coroutine
from the body to the last byte, cancelled when the client leaves, and with it the pod's work.
"""

from __future__ import annotations

import asyncio
import logging

from prism_server.http.asgi import Receive, Scope, Send, header
from prism_server.http.headers import REQUEST_ID, request_id_of
from prism_server.http.sse import COMMENT, STREAM_HEADERS
from prism_server.router.asgi import Body, ends_when_client_leaves
from prism_server.router.breaker import Blame
from prism_server.router.decision import Decision, NoPod
from prism_server.router.downstream import Downstream
from prism_server.router.events import WholeEvents, error_events, error_events_from
from prism_server.router.fleet import Ticket
from prism_server.router.members import Member
from prism_server.router.proxied_headers import (
    answer_headers,
    placement_headers,
    request_headers,
    reused_tokens,
)
from prism_server.router.refusals import (
    MOST_SUSPICIONS,
    SHUTTING_DOWN,
    LastWord,
    Refusal,
    RouterFault,
    ShuttingDown,
    Silent,
    last_word,
    refusal_from,
    refusal_of,
    suspicion,
)
from prism_server.router.request_keys import RequestKeys
from prism_server.router.services import Services
from prism_server.router.upstream import Connection, Head, UpstreamError, request_head

OK = 200
FIRST_REFUSAL = 400
"""From this status on a pod has computed nothing that it would keep."""
FIRST_FAULT = 500
"""From this status on the pod may be at fault, or the request may have made it fail."""

log = logging.getLogger(__name__)


class BrokenOff(Exception):
    """An answer that is no stream of events cannot be ended but by closing the connection."""


class Exchange:
    """`run` answers one request."""

    def __init__(self, services: Services, scope: Scope, receive: Receive, send: Send) -> None:
        self._services = services
        self._scope = scope
        self._receive = receive
        self._request_id = request_id_of(header(scope, REQUEST_ID))
        self._down = Downstream(send, self._request_id, services.lifecycle.is_going)
        self._loop = asyncio.get_running_loop()
        self._body = Body(services.buffers)
        self._keys = RequestKeys()
        self._blame = Blame()
        self._connection: Connection | None = None
        self._member: Member | None = None
        self._sent_s = self._body_s = 0.0
        self._has_first_byte = False
        self._is_stopping = False
        self._body_timeout: asyncio.Timeout | None = None
        """While the body comes. The listener looks after clients that stall; this one is for the router's own end."""

    async def run(self) -> None:
        """From the body to the last byte. Raises ClientLeft; PrismError before anything was sent; BrokenOff."""
        self._services.open.add(self)
        try:
            await self._read_body()
            async with ends_when_client_leaves(self._receive):
                self._body_s = self._loop.time()
                if self._body.data:
                    with self._services.metrics.keys_s.time():
                        self._keys = await self._services.keys_of(self._path, self._body)
                await self._forward()
        finally:
            self._services.open.discard(self)
            self._body.release()

    async def _read_body(self) -> None:
        try:
            async with asyncio.timeout(None) as self._body_timeout:
                await self._body.read(self._scope, self._receive, self._services.settings.http.max_body_bytes)
        except TimeoutError:
            raise RouterFault("the router is shutting down", SHUTTING_DOWN) from None
        finally:
            self._body_timeout = None

    @property
    def status(self) -> int | None:
        """Of the answer, once its head has gone."""
        return self._down.status

    @property
    def _path(self) -> str:
        path: str = self._scope["path"]
        return path

    # what the ticker and the drain do

    def tick(self, now_s: float) -> None:
        """Gives a silent pod up; lets a stream that has nothing to say show that it lives."""
        connection, member, limits = self._connection, self._member, self._services.settings.upstream
        if connection is None or member is None or not connection.is_waiting:
            return
        last_byte_s = connection.last_byte_s
        if member.owes_signs and now_s - max(last_byte_s, member.last_sign_s) > limits.silence_timeout_s:
            connection.fail(Silent(f"no sign of life for {limits.silence_timeout_s:g} s"))
        elif not self._has_first_byte and now_s - self._sent_s > limits.header_timeout_s:
            connection.fail(Silent(f"no answer within {limits.header_timeout_s:g} s"))
        elif self._has_first_byte and now_s - last_byte_s > limits.idle_timeout_s:
            connection.fail(Silent(f"nothing more for {limits.idle_timeout_s:g} s"))
        elif self._keys.is_stream and now_s - self._down.last_sent_s >= limits.comment_every_s:
            connection.nudge()

    def stop(self) -> None:
        """Ends with an error, in whatever form the answer has by now."""
        self._is_stopping = True
        if self._connection is not None:
            self._connection.fail(ShuttingDown("the router is shutting down"))
        elif self._body_timeout is not None:
            self._body_timeout.reschedule(self._loop.time())

    # placing and trying

    async def _forward(self) -> None:
        services = self._services
        services.retries.request()
        tried, num_suspicions = set[str](), 0
        refusal: Refusal | None = None
        while True:
            decision = services.place(self._keys, tried)
            if isinstance(decision, NoPod):
                services.metrics.unplaced(decision.reason)
                self._blame.nobody_else(self._loop.time(), self._body.checksum)
                return await self._give_up(refusal, decision)
            if refusal is not None:
                if not self._may_retry(len(tried)):
                    services.metrics.retry_denied()
                    return await self._give_up(refusal)
                services.metrics.retried(refusal.cause)
            services.metrics.decided(decision.reason)
            refusal = await self._try(decision)
            if refusal is None:
                return None
            if refusal.is_final:
                return await self._give_up(refusal)
            tried.add(decision.uid)
            num_suspicions += refusal.is_suspicious
            if num_suspicions >= MOST_SUSPICIONS:
                return await self._suspect(refusal)

    def _may_retry(self, num_tries: int) -> bool:
        """Whether one more pod may be asked; it is then counted."""
        limits = self._services.settings.upstream
        if num_tries < limits.max_tries and self._services.retries.try_retry():
            return True
        if num_tries >= limits.max_tries or limits.retry_share == 0:  # else the second tries of others will tell
            self._blame.nobody_else(self._loop.time(), self._body.checksum)
        return False

    async def _try(self, decision: Decision) -> Refusal | None:
        """The request at one pod; None once it is answered, well or not."""
        services, member = self._services, self._services.members[decision.uid]
        now_s = self._loop.time()
        ticket = services.fleet.dispatch(decision, self._keys, now_s)
        member.breaker.sent(now_s)
        self._member, self._sent_s = member, now_s
        try:
            refusal = await self._ask(member, decision, ticket)
        except UpstreamError as error:
            refusal = refusal_from(error)
        finally:
            self._connection = self._member = None
            services.fleet.finish(ticket, self._loop.time())
        if refusal is not None:
            self._note_refusal(member, refusal)
        return refusal

    def _note_refusal(self, member: Member, refusal: Refusal) -> None:
        now_s = self._loop.time()
        if refusal.is_fault:
            self._blame.failed(member.breaker, now_s, refusal.is_certain)
        elif not refusal.is_final:
            member.breaker.succeeded()
            self._services.fleet.refused(member.endpoint.uid, refusal.retry_after_s, now_s)

    async def _ask(self, member: Member, decision: Decision, ticket: Ticket) -> Refusal | None:
        origin = member.endpoint.api
        async with self._services.pool.connection(origin) as connection:
            if self._is_stopping:
                raise ShuttingDown("the router is shutting down")
            self._connection = connection
            headers = request_headers(self._scope["headers"], self._request_id)
            body = self._body.data
            # Also a GET's: without its length the pod would take it for the next request.
            length = len(body) if body or self._scope["method"] != "GET" else None
            connection.send(request_head(self._scope["method"], self._target(), origin, headers, length), body)
            head = await self._head(connection)
            refusal = await refusal_of(head, connection)
            if refusal is not None:
                return refusal
            self._first_byte(member, decision, ticket, head)
            await self._answer(head, connection, decision)
            return None

    def _target(self) -> bytes:
        raw: bytes = self._scope["raw_path"]
        query: bytes = self._scope["query_string"]
        return raw + b"?" + query if query else raw

    async def _head(self, connection: Connection) -> Head:
        """Waits for the pod. A client that waits for events is sent comments meanwhile, once the pod has the request:
        they are no first byte, so another pod can still be asked."""
        while (head := await connection.head()) is None:
            if connection.is_sent:
                if self._down.status is None:
                    await self._down.start(OK, STREAM_HEADERS)
                await self._down.data(COMMENT)
        return head

    def _first_byte(self, member: Member, decision: Decision, ticket: Ticket, head: Head) -> None:
        now_s, metrics = self._loop.time(), self._services.metrics
        self._has_first_byte = True
        if head.status < FIRST_REFUSAL:
            self._services.fleet.first_byte(ticket, now_s)
        if head.status < FIRST_FAULT:
            member.breaker.succeeded()
            self._blame.answered(now_s)
        else:
            self._blame.failed(member.breaker, now_s, is_certain=False)
            self._blame.nobody_else(now_s, self._body.checksum)
        self._body.release()
        metrics.head_s.observe(now_s - self._body_s)
        metrics.placed(decision)
        reused = reused_tokens(head)
        if reused is not None:
            metrics.reused(*reused)

    # answering

    async def _answer(self, head: Head, connection: Connection, decision: Decision) -> None:
        """Nothing that happens from here on is for another pod to mend: no UpstreamError leaves."""
        placed = placement_headers(decision, head)
        is_events = (head.get(b"content-type") or b"").startswith(b"text/event-stream")
        if self._down.status is None:
            await self._down.start(head.status, [*answer_headers(head), *placed])
            await (self._relay_events(connection) if is_events else self._relay_bytes(connection))
        elif is_events:  # the head has gone with the first comment
            await self._down.data(b"".join(b": %s %s\n" % header for header in placed) + b"\n")
            await self._relay_events(connection)
        else:
            await self._relay_as_error(connection)

    async def _relay_events(self, connection: Connection) -> None:
        events = WholeEvents()
        try:
            while (piece := await connection.read()) is not None:
                whole = events.take(piece) if piece else COMMENT
                if whole:
                    await self._down.data(whole)
            await self._down.end(events.rest())
        except UpstreamError as error:
            await self._down.end(self._broken_off(error))

    async def _relay_as_error(self, connection: Connection) -> None:
        """A refusal that came after comments had opened a stream."""
        try:
            await self._down.end(error_events_from(self._path, await connection.rest()))
        except UpstreamError as error:
            await self._down.end(self._broken_off(error))

    def _broken_off(self, error: UpstreamError) -> bytes:
        """The last events of an answer that cannot go on."""
        code = SHUTTING_DOWN if isinstance(error, ShuttingDown) else "upstream_failed"
        self._services.metrics.broke(code)
        return error_events(self._path, RouterFault(f"the answer broke off: {error}", code))

    async def _relay_bytes(self, connection: Connection) -> None:
        try:
            while (piece := await connection.read()) is not None:
                if piece:
                    await self._down.data(piece)
            await self._down.end()
        except UpstreamError as error:
            self._services.metrics.broke("upstream_failed")
            raise BrokenOff(str(error)) from error

    async def _suspect(self, refusal: Refusal) -> None:
        """No further pod is risked."""
        self._services.metrics.suspected()
        log.warning(
            "request %s: %d pods failed at it, no other is asked; the last: %s",
            self._request_id.decode("latin-1"),
            MOST_SUSPICIONS,
            refusal.reason,
        )
        await self._say(suspicion(refusal))

    async def _give_up(self, refusal: Refusal | None, no_pod: NoPod | None = None) -> None:
        """Nobody takes the request."""
        await self._say(last_word(refusal, no_pod))

    async def _say(self, last: LastWord) -> None:
        if self._down.status is None:
            await self._down.whole(last.status, last.body, last.headers)
        else:
            await self._down.end(error_events_from(self._path, last.body))
