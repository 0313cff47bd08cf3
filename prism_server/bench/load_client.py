"""A client for load: streamed chat completions over keep-alive connections, as little work a token as Python allows."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from prism_server.bench.client import AnswerFailed, refusal
from prism_server.bench.stream_stats import Kind, StreamResult

PATH = "/v1/chat/completions"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class LoadClient:
    """`async with LoadClient(url, model) as client`: as many connections as there are requests at once."""

    def __init__(self, base_url: str, model: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        address = urlsplit(base_url)
        if address.scheme != "http" or not address.hostname:
            raise AnswerFailed(f"{base_url!r} must look like http://host:port")
        self.model = model
        self._host, self._port = address.hostname, address.port or 80
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {address.path.rstrip('/')}{PATH} HTTP/1.1\r\nhost: {address.netloc}\r\n"
            f"content-type: application/json\r\n{key}content-length: "
        ).encode()
        self._timeout_s = timeout_s
        self._idle: list[_Connection] = []

    async def __aenter__(self) -> LoadClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._idle:
            connection.close()

    async def send(self, body: bytes, kind: Kind) -> StreamResult:
        """One request; whatever goes wrong is in the result's `error`."""
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await self._connection()
                return await connection.exchange(b"%b%d\r\n\r\n%b" % (self._head, len(body), body), kind)
        except TimeoutError:
            return StreamResult(kind, sent_s, error=f"no end after {self._timeout_s:g} s")
        except OSError as error:
            return StreamResult(kind, sent_s, error=error.strerror or type(error).__name__)

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._idle), self._host, self._port)
        return connection


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection and the answer that streams in on it, if any. Rejoins `idle` when that has ended."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._answer: _Answer | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def exchange(self, request: bytes, kind: Kind) -> StreamResult:
        assert self._transport is not None
        answer = self._answer = _Answer(kind)
        self._transport.write(request)
        try:
            return await answer.done
        except asyncio.CancelledError:
            self._transport.abort()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.close()  # it speaks unasked
            return
        try:
            answer.feed(data)
        except (httptools.HttpParserError, msgspec.DecodeError) as error:
            answer.fail(f"not a stream of chat chunks: {error}")
        if answer.done.done():
            self._answer = None
            if answer.keeps_connection:
                self._idle.append(self)
            else:
                self.close()

    def connection_lost(self, _: Exception | None) -> None:
        if self._answer is not None:
            self._answer.fail("the connection was closed before the answer ended")
            self._answer = None


class _Answer:
    """One response while it comes in; the parser calls the `on_` methods."""

    def __init__(self, kind: Kind) -> None:
        self.done: asyncio.Future[StreamResult] = asyncio.get_running_loop().create_future()
        self.keeps_connection = False
        self._kind: Kind = kind
        self._sent_s = self._now_s = time.perf_counter()
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._arrivals_s: list[float] = []
        self._usage = _Usage()
        self._error = ""

    def feed(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self._parser.feed_data(data)

    def fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_result(StreamResult(self._kind, self._sent_s, error=reason))

    def on_body(self, body: bytes) -> None:
        whole = self._rest + body
        if self._parser.get_status_code() != 200:
            self._rest = whole
            return
        *lines, self._rest = whole.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data != b"[DONE]":
                    self._take(_decode_chunk(data))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self.fail(refusal(status, self._rest))
        elif self._error or not self._arrivals_s:
            self.fail(self._error or "the answer has no token")
        else:
            self.keeps_connection = bool(self._parser.should_keep_alive())
            self.done.set_result(self._result())

    def _take(self, chunk: _Chunk) -> None:
        if chunk.error:
            self._error = str(chunk.error)
        if chunk.usage is not None:
            self._usage = chunk.usage
        for choice in chunk.choices:
            delta = choice.delta
            text = delta.content if delta.content is not None else delta.reasoning_content
            is_opening = delta.role is not None and not text and not self._arrivals_s
            if text is not None and not is_opening:
                self._arrivals_s.append(self._now_s)

    def _result(self) -> StreamResult:
        usage, details = self._usage, self._usage.prompt_tokens_details
        return StreamResult(
            self._kind,
            self._sent_s,
            tuple(self._arrivals_s),
            num_tokens=usage.completion_tokens or len(self._arrivals_s),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
        )
