"""What a client may do with its connection, and for how long: a listener before an application of the test's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from prism_server.http.client_connection import LEAST_PROGRESS_BYTES
from prism_server.http.listener import Listener
from prism_server.http.sockets import MAX_HEAD_BYTES, bind

TIMEOUT_S = 0.3
SLACK_S = 30.0
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\n"
PIECE = b"x" * (1 << 18)


class App:
    """Echoes a body's length; /flood answers without end, /slow after four time-outs, /deaf without reading."""

    def __init__(self) -> None:
        self.inside = 0
        self.left = 0
        """Requests whose client had gone before they were answered."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Of the last request, as they stand after its body."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.inside += 1
        try:
            length = await self._length(receive) if scope["path"] != "/deaf" else 0
            self.headers = scope["headers"]
            if length is None:
                self.left += 1
            elif scope["path"] == "/flood":
                await self._flood(receive, send)
            else:
                await asyncio.sleep(4 * TIMEOUT_S if scope["path"] == "/slow" else 0)
                body = b"%d" % length
                headers = [(b"content-length", b"%d" % len(body))]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": body})
        finally:
            self.inside -= 1

    async def _length(self, receive: Any) -> int | None:
        length = 0
        while (message := await receive())["type"] == "http.request":
            length += len(message["body"])
            if not message["more_body"]:
                return length
        return None

    async def _flood(self, receive: Any, send: Any) -> None:
        left = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not left.done():
            await send({"type": "http.response.body", "body": PIECE, "more_body": True})
            await asyncio.sleep(0)
        self.left += 1


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await asyncio.sleep(pause_s)

    async def answer(self) -> tuple[int, bytes]:
        """The next one's status and body; (0, b"") at the end."""
        try:
            async with asyncio.timeout(SLACK_S):
                head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
                length = next(line for line in head.splitlines() if line.startswith("content-length: "))
                return int(head.split(" ")[1]), await self._reader.readexactly(int(length.split(": ")[1]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0, b""

    async def code(self) -> tuple[int, str]:
        """Status and code of a refusal."""
        status, body = await self.answer()
        return status, json.loads(body)["error"]["code"]

    def close(self) -> None:
        self._writer.transport.abort()


Connect = Callable[[], Awaitable[Client]]
Scene = Callable[[App, Connect], Awaitable[None]]


def play(scene: Scene, timeout_s: float = TIMEOUT_S) -> None:
    """Runs `scene` beside a listener; afterwards nobody is inside."""

    async def run() -> None:
        app, bound, clients = App(), bind("127.0.0.1", 0, "port"), list[Client]()
        port = bound.getsockname()[1]

        async def connect() -> Client:
            clients.append(Client(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)))
            return clients[-1]

        listener = Listener(bound, app, 1.0, timeout_s)
        listener.start()
        try:
            await scene(app, connect)
            await eventually(lambda: app.inside == 0)
        finally:
            for client in clients:
                client.close()
            await listener.close()

    asyncio.run(run())


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SLACK_S):
        while not holds():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "half",
    [
        b"POST /x HT",
        HEAD + b"content-len",
        HEAD + b"content-length: 10\r\n\r\n",
        HEAD + b"content-length: 10\r\n\r\n12345",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\nx-trailer: ",
    ],
)
def test_a_client_that_stalls_half_way_is_408_and_nobody_stays_inside(half: bytes) -> None:
    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        await client.send(half)
        assert await client.code() == (408, "request_timeout")
        assert await client.answer() == (0, b"")
        await eventually(lambda: app.left == (b"\r\n\r\n" in half))

    play(scene)


def test_a_client_that_says_nothing_is_hung_up_on_without_a_word() -> None:
    async def scene(app: App, connect: Connect) -> None:
        silent, only_blank_lines = await connect(), await connect()
        await only_blank_lines.send(b"\r\n")
        assert await silent.answer() == (0, b"")
        assert await only_blank_lines.answer() == (0, b"")
        used = await connect()  # and after an answer: the blank line has ended uvicorn's own timer
        await used.send(HEAD + b"content-length: 0\r\n\r\n")
        assert await used.answer() == (200, b"0")
        await used.send(b"\r\n")
        assert await used.answer() == (0, b"")

    play(scene)


def test_a_second_request_on_a_connection_has_the_same_time_out() -> None:
    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        await client.send(HEAD + b"content-length: 2\r\n\r\n12")
        assert await client.answer() == (200, b"2")
        await client.send(HEAD + b"content-length: 2\r\n\r\n1")
        assert await client.code() == (408, "request_timeout")

    play(scene)


def test_a_trickle_does_not_hold_a_connection() -> None:
    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        trickle = asyncio.create_task(client.send(HEAD, *[b"x: 1\r\n"] * 500, pause_s=TIMEOUT_S / 10))
        assert await client.code() == (408, "request_timeout")
        trickle.cancel()

    play(scene)


def test_a_slow_upload_that_goes_on_may_last_longer_than_the_time_out() -> None:
    """Its pieces are twenty to a time-out."""

    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        begun_s = time.monotonic()
        await client.send(HEAD + b"content-length: %d\r\n\r\n" % (25 * LEAST_PROGRESS_BYTES))
        await client.send(*[b"x" * LEAST_PROGRESS_BYTES] * 25, pause_s=0.1)
        assert await client.answer() == (200, b"%d" % (25 * LEAST_PROGRESS_BYTES))
        assert time.monotonic() - begun_s > 2.0

    play(scene, timeout_s=2.0)


def test_an_answer_may_take_longer_than_the_time_out_also_beside_half_a_next_request() -> None:
    async def scene(app: App, connect: Connect) -> None:
        slow = HEAD.replace(b"/x", b"/slow") + b"content-length: 0\r\n\r\n"
        patient, hasty, half = await connect(), await connect(), await connect()
        await patient.send(slow)
        await hasty.send(slow + slow)
        await half.send(slow + b"POST /x")
        assert await patient.answer() == (200, b"0")
        assert [await hasty.answer() for _ in range(2)] == [(200, b"0")] * 2
        assert await half.answer() == (200, b"0")
        assert await half.code() == (408, "request_timeout")

    play(scene)


def test_a_client_that_takes_nothing_of_its_answer_is_hung_up_on() -> None:
    async def scene(app: App, connect: Connect) -> None:
        await (await connect()).send(HEAD.replace(b"/x", b"/flood") + b"content-length: 0\r\n\r\n")
        await eventually(lambda: app.inside == 1)
        await eventually(lambda: app.left == 1)

    play(scene)


def test_the_rest_of_a_body_that_nobody_wants_is_not_waited_for_and_not_answered_twice() -> None:
    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        await client.send(HEAD.replace(b"/x", b"/deaf") + b"content-length: 10\r\n\r\n1")
        assert await client.answer() == (200, b"0")
        await client.send(b"2")
        assert await client.answer() == (0, b"")

    play(scene)


@pytest.mark.parametrize("filler", [b"x", b"x: 1\r\n"])
def test_a_head_without_end_is_431(filler: bytes) -> None:
    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        lines = HEAD + b"x-long: 1\r\n" + (b"" if filler.endswith(b"\n") else b"y: ")
        whole, part = divmod(MAX_HEAD_BYTES + 1 - len(lines), len(filler))
        await client.send(lines + filler * whole + filler[:part])
        assert await client.code() == (431, "head_too_large")
        assert await client.answer() == (0, b"")

    play(scene, timeout_s=60.0)


def test_a_whole_head_that_is_too_long_is_431_however_it_comes() -> None:
    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        await client.send(HEAD + b"content-length: 0\r\nx: %s\r\n\r\n" % (b"x" * (MAX_HEAD_BYTES - 200)))
        assert await client.answer() == (200, b"0")
        await client.send(HEAD + b"content-length: 0\r\nx: %s\r\n\r\n" % (b"x" * MAX_HEAD_BYTES))
        assert (await client.answer())[0] in (431, 0)  # 0: hung up on before it had sent all
        assert app.inside == 0

    play(scene, timeout_s=60.0)


def test_trailers_join_no_headers_and_have_an_end() -> None:
    async def scene(app: App, connect: Connect) -> None:
        chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n"
        client = await connect()
        await client.send(chunked + b"authorization: late\r\n\r\n")
        assert await client.answer() == (200, b"5")
        assert [name for name, _ in app.headers] == [b"host", b"transfer-encoding"]
        await client.send(chunked + b"x: ")
        await client.send(*[b"x" * 1024] * (MAX_HEAD_BYTES // 1024 + 2), pause_s=0.001)
        assert (await client.answer())[0] in (431, 0)

    play(scene, timeout_s=60.0)


def test_garbage_after_a_request_does_not_get_into_its_answer() -> None:
    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        await client.send(HEAD.replace(b"/x", b"/slow") + b"content-length: 0\r\n\r\n" + b"\x00\x01 no HTTP\r\n\r\n")
        assert await client.answer() == (0, b"")

    play(scene)


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"


@pytest.mark.parametrize("cut", [0, 20, len(HEAD) + len(UPGRADE) + 10, -3, -1])
@pytest.mark.parametrize(
    "framed", [b"content-length: 5\r\n\r\n12345", b"transfer-encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n"]
)
def test_who_asks_to_upgrade_is_answered_as_anybody(framed: bytes, cut: int) -> None:
    """Java's own client does so with every first request, which would have no body else."""

    async def scene(app: App, connect: Connect) -> None:
        client, request = await connect(), HEAD + UPGRADE + framed
        for _ in range(2):
            await client.send(request[:cut], request[cut:], pause_s=0.05)
            assert await client.answer() == (200, b"5")
            assert (b"upgrade", b"h2c") in app.headers

    play(scene, timeout_s=60.0)


def test_a_body_behind_an_upgrade_is_no_request() -> None:
    """A proxy that hands the field on would give its answer to somebody else."""
    hidden = HEAD + b"content-length: 3\r\n\r\nabc"

    async def scene(app: App, connect: Connect) -> None:
        client = await connect()
        request = HEAD + UPGRADE + b"content-length: %d\r\n\r\n" % len(hidden)
        without = b"GET /x HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"\r\n"
        await client.send(request, hidden + without * 1500 + request + hidden, pause_s=0.05)
        assert await client.answer() == (200, b"%d" % len(hidden))
        for _ in range(1500):
            assert await client.answer() == (200, b"0")
        assert await client.answer() == (200, b"%d" % len(hidden))
        await client.send(HEAD + b"content-length: 1\r\n\r\n1")
        assert await client.answer() == (200, b"1")

    play(scene, timeout_s=60.0)
