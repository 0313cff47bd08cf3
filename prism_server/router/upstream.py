"""HTTP/1.1 to the pods: kept connections, bodies passed as they came, answers piece by piece, with back-pressure.

Our own on asyncio's protocols and httptools: a proxy forwards tens of thousands of small pieces a second, and general
clients spend several times as much on each (docs/router.md has the measurement). Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

from prism_server.http.sockets import notice_lost_peer

READ_AHEAD_BYTES = 1 << 18
"""Held for a reader that is slower than the pod; beyond it the pod's connection is not read."""
MAX_HEAD_BYTES = 1 << 16
"""Of an answer's head with its interim ones; also of whatever else comes between two pieces of a body."""
MAX_WHOLE_BYTES = 1 << 20
"""Of answers that are gathered before they are looked at."""
LEAST_STATUS, LEAST_FINAL_STATUS, MOST_STATUS = 100, 200, 599
IDLE_S = 30.0
"""How long an unused connection is kept: less than servers keep theirs, else one is used while it is being closed."""
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES = 5, 5, 2
"""A host that is gone without a word is noticed in 15 s, whatever is being waited for."""

Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """The pod did not answer, or not to the end. The text says what happened, for people."""


class ConnectFailed(UpstreamError):
    """No connection: nothing has reached the pod."""


class ConnectionBroken(UpstreamError):
    """The connection ended before the answer did."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect to."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None

    @property
    def authority(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; names in lower case."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]

    def get(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)


class Connection(asyncio.Protocol):
    """One connection, one request at a time: `send`, then `head`, then `read` until None."""

    def __init__(self, on_lost: OnLost) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._begin()
        self._is_complete = True  # nothing has been asked yet
        self.last_byte_s = self.idle_since_s = self._loop.time()

    def _begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._head: Head | None = None
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._bytes_for_nothing = 0
        """Since the head or a piece of the body: neither may be waited for without end."""
        self._is_complete = self._is_kept = False
        self._is_paused = False
        self._is_nudged = False
        self._error: UpstreamError | None = None

    def send(self, head: bytes, body: bytes | bytearray = b"") -> None:
        """Starts a request. Its bytes go out as the pod takes them; the answer may come before they are all out."""
        self._begin()
        self.last_byte_s = self._loop.time()
        if self._transport is None or self._transport.is_closing():
            self._error = ConnectFailed("the pod closed the connection at once")
        else:
            self._transport.writelines([head, body] if body else [head])

    @property
    def is_sent(self) -> bool:
        """Whether the kernel has taken the whole request."""
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for the pod, and not the pod for us."""
        return self._waiter is not None

    @property
    def is_reusable(self) -> bool:
        """Whether the answer came to its end, read or not, and the pod keeps the connection."""
        is_open = self._transport is not None and not self._transport.is_closing()
        return is_open and self._is_complete and self._is_kept and self.is_sent and not self._is_paused

    async def head(self) -> Head | None:
        """The answer's head; None where `nudge` came first. Raises UpstreamError."""
        while self._head is None:
            self._check()
            if self._was_nudged():
                return None
            await self._news()
        return self._head

    async def read(self) -> bytes | None:
        """All that has come of the body since the last call, None at its end, b"" where `nudge` came first.

        Raises UpstreamError, after everything that came before the fault has been read.
        """
        while not self._pieces:
            if self._is_complete:
                return None
            self._check()
            if self._was_nudged():
                return b""
            await self._news()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def rest(self, most_bytes: int = MAX_WHOLE_BYTES) -> bytes:
        """The whole body, for answers that should be short. Raises UpstreamError, also beyond `most_bytes`."""
        pieces, num_bytes = list[bytes](), 0
        while (piece := await self.read()) is not None:
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > most_bytes:
                raise UpstreamError(f"the answer is larger than {most_bytes} bytes")
        return b"".join(pieces)

    def nudge(self) -> None:
        """Wakes whoever waits in `head` or `read`, without news."""
        self._is_nudged = True
        self._wake()

    def fail(self, error: UpstreamError) -> None:
        """Gives the answer up: what has come is still read, then `error` is raised."""
        if not self._is_complete and self._error is None:
            self._error = error
            self._wake()

    def abort(self) -> None:
        """Closes at once; the pod notices and stops working for us."""
        if self._transport is not None:
            self._transport.abort()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _was_nudged(self) -> bool:
        nudged, self._is_nudged = self._is_nudged, False
        return nudged

    async def _news(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        notice_lost_peer(transport.get_extra_info("socket"), KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_PROBES)

    def data_received(self, data: bytes) -> None:
        self.last_byte_s = self._loop.time()
        self._bytes_for_nothing += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break_off(f"not HTTP: {error}")
        if self._bytes_for_nothing > MAX_HEAD_BYTES:
            self._break_off(f"a head of more than {MAX_HEAD_BYTES} bytes")
        self._wake()

    def _break_off(self, problem: str) -> None:
        """The pod says what it should not. What it has said before stands."""
        self.fail(ConnectionBroken(problem))
        self.abort()

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.fail(ConnectionBroken(f"the connection broke: {error or 'closed by the pod'}"))
        self._on_lost(self)

    # httptools' side

    def on_message_begin(self) -> None:
        if self._is_complete:
            raise ValueError("more than was asked for")  # ends in `data_received`

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not LEAST_STATUS <= status <= MOST_STATUS:
            raise ValueError(f"status {status}")  # ends in `data_received`
        if status >= LEAST_FINAL_STATUS:  # interim answers announce one
            self._head = Head(status, tuple(self._headers))
            self._bytes_for_nothing = 0
        self._headers = []

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._num_bytes += len(body)
        self._bytes_for_nothing = 0
        if self._num_bytes > READ_AHEAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._head is not None:
            self._is_complete = True
            self._is_kept = self._parser.should_keep_alive()  # only known here: the parser then begins anew


OnLost = Callable[[Connection], None]


async def connect(origin: Origin, timeout_s: float, on_lost: OnLost = lambda _: None) -> Connection:
    """A new connection, which tells `on_lost` when it has ended. Raises ConnectFailed."""
    at = origin.authority.decode()
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(on_lost), origin.host, origin.port, ssl=origin.tls
            )
    except TimeoutError:
        raise ConnectFailed(f"no connection to {at} within {timeout_s:g} s") from None
    except OSError as error:
        raise ConnectFailed(f"no connection to {at}: {error}") from None
    return connection


class Pool:
    """Connections to all pods."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Origin, list[Connection]] = {}

    @contextlib.asynccontextmanager
    async def connection(self, origin: Origin) -> AsyncIterator[Connection]:
        """A connection for one request: kept if the answer came to its end, else closed at once.

        Raises ConnectFailed.
        """
        connection = self._kept(origin)
        if connection is None:
            connection = await connect(origin, self._connect_timeout_s, lambda lost: self._lost(origin, lost))
        try:
            yield connection
        finally:
            if connection.is_reusable:
                connection.idle_since_s = asyncio.get_running_loop().time()
                self._idle.setdefault(origin, []).append(connection)
            else:
                connection.abort()

    def forget(self, origin: Origin) -> None:
        """Closes the unused connections to a pod that is gone."""
        for connection in self._idle.pop(origin, []):
            connection.abort()

    def close(self) -> None:
        for origin in list(self._idle):
            self.forget(origin)

    def _kept(self, origin: Origin) -> Connection | None:
        idle, now_s = self._idle.get(origin, []), asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()
            if connection.is_reusable and now_s - connection.idle_since_s < IDLE_S:
                return connection
            connection.abort()
        return None

    def _lost(self, origin: Origin, connection: Connection) -> None:
        idle = self._idle.get(origin, [])
        if connection in idle:
            idle.remove(connection)
            if not idle:
                del self._idle[origin]  # the pod may be gone for good


def request_head(method: str, target: bytes, origin: Origin, headers: Headers, num_body_bytes: int | None) -> bytes:
    """The first lines of a request. `num_body_bytes` None: it has no body."""
    lines = [b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method.encode(), target, origin.authority)]
    lines += [b"%s: %s\r\n" % header for header in headers]
    if num_body_bytes is not None:
        lines.append(b"content-length: %d\r\n" % num_body_bytes)
    return b"".join(lines) + b"\r\n"
