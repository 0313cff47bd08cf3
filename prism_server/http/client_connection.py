"""A client's connection: uvicorn's protocol, and what it lacks against clients that stall or never come to an end.

A client whose turn it is has to go on: with the head of its request or its body by `LEAST_PROGRESS_BYTES`, with taking
its answer by anything at all. One timer per connection looks after it, so that pieces of answers cost nothing more.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from prism_server.errors import BadRequest
from prism_server.http.error_body import error_json
from prism_server.http.request_parser import RequestParser

FRAMING_BYTES = len(": \r\n")
"""Around a header."""
LEAST_PROGRESS_BYTES = 1 << 12
"""Within the time-out, unless that is all there is to come: fewer are a trickle that only holds the connection."""


class ListenerConfig(uvicorn.Config):
    """uvicorn's, with the bounds of `ClientConnection`."""

    client_timeout_s: float
    max_head_bytes: int
    """Also of whatever else comes between two pieces of a body."""


class ClientConnection(HttpToolsProtocol):
    """Made by uvicorn's server for every connection."""

    def __init__(
        self,
        config: ListenerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.parser = RequestParser(self)  # type: ignore[assignment]
        self._timeout_s, self._max_head_bytes = config.client_timeout_s, config.max_head_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._moved_s = self.loop.time()
        self._progress_bytes = 0
        self._head_bytes = 0
        self._bytes_for_nothing = 0
        """Since the last head or piece of a body: neither may be waited for without end."""
        self._is_reading_head = True
        self._is_reading = False
        """Whether a request has begun and has not come to its end."""
        self._untaken_bytes = -1
        """Of the answer, at the last look; -1: some have been taken since."""

    # asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(self._timeout_s, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._bytes_for_nothing += len(data)
        self._progress_bytes += len(data)
        if self._progress_bytes >= LEAST_PROGRESS_BYTES:
            self._moved()
        super().data_received(data)
        if self._bytes_for_nothing > self._max_head_bytes and not self.transport.is_closing():
            self._refuse_head()

    def resume_writing(self) -> None:
        self._untaken_bytes = -1
        super().resume_writing()

    # httptools' side

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_reading_head = self._is_reading = True
        self._moved()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_reading_head:  # else a trailer, which must not join headers that have been looked at
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        fields_bytes = sum(len(name) + len(value) + FRAMING_BYTES for name, value in self.headers)
        self._head_bytes = len(self.url) + fields_bytes
        if self._head_bytes > self._max_head_bytes:
            raise ValueError("the head is too long")  # ends in `send_400_response`
        super().on_headers_complete()  # raises for what has no path
        self._is_reading_head = False
        self._bytes_for_nothing = 0
        self._moved()

    def on_body(self, body: bytes) -> None:
        self._bytes_for_nothing = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_reading = False
        self._bytes_for_nothing = 0
        super().on_message_complete()

    # a client that does not keep to the rules

    def send_400_response(self, msg: str) -> None:
        """uvicorn's word for what is no HTTP."""
        if self._head_bytes > self._max_head_bytes:
            self._refuse_head()
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, "bad_http", "the request is not valid HTTP")

    def _refuse_head(self) -> None:
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        limit = f"{self._max_head_bytes} bytes, the limit"
        self._refuse(status, "head_too_large", f"the request's head is larger than {limit}")

    def _refuse(self, status: HTTPStatus, code: str, message: str) -> None:
        """The last word on this connection, where it can still be heard as the answer to the request that comes in."""
        if not self._can_answer:
            self.transport.abort()
            return
        body = error_json(BadRequest(message, status=status, code=code))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:  # nobody is there for another answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    @property
    def _is_reading_body(self) -> bool:
        return self._is_reading and not self._is_reading_head

    @property
    def _can_answer(self) -> bool:
        """Whether nothing has been said to the request that comes in, and no answer to one before it is under way."""
        if self.pipeline:
            return False
        if self._is_reading_body:
            return not self.cycle.response_started
        return self.cycle is None or self.cycle.response_complete

    # a client that stalls

    def _moved(self) -> None:
        self._moved_s = self.loop.time()
        self._progress_bytes = 0

    def _look(self) -> None:
        if not self._waits_for_client():
            self._moved()
        if self.loop.time() - self._moved_s < self._timeout_s:
            self._timer = self.loop.call_at(self._moved_s + self._timeout_s, self._look)
        elif self._is_reading:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, "request_timeout", "the rest of the request did not come in time")
        else:
            self.transport.abort()

    def _waits_for_client(self) -> bool:
        """Whether nothing can go on here before the client does."""
        is_answering = self.cycle is not None and not self.cycle.response_complete and not self._is_reading_body
        if self.pipeline or is_answering:
            return self._has_taken_nothing()
        if self.flow.read_paused:
            return False  # there is more than is wanted now
        return self._is_reading or self.timeout_keep_alive_task is None  # between requests uvicorn has its own timer

    def _has_taken_nothing(self) -> bool:
        """Whether an answer stands ready, and none of it has been taken since the last look."""
        untaken_bytes = self.transport.get_write_buffer_size()
        is_stuck = self.flow.write_paused and untaken_bytes == self._untaken_bytes
        self._untaken_bytes = untaken_bytes
        return is_stuck
