"""Pods that do not speak HTTP as they should: what they say is never taken for the answer to something else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from router_http_support import chat_body, eventually, picture, routing, sse_data
from scripted_pods import Asked, HangUp, Script, hangs_up, never, refusal, says_yes, scripted, send_chunk, start_events

from prism_server.router.upstream import (
    MAX_HEAD_BYTES,
    MAX_WHOLE_BYTES,
    ConnectFailed,
    Connection,
    ConnectionBroken,
    Head,
    Origin,
    Pool,
    UpstreamError,
    connect,
    request_head,
)

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes"
SLACK_S = 30.0
Scene = Callable[[Pool, Origin], Awaitable[None]]


def play(scene: Scene, *answers: bytes, closes: bool = False) -> None:
    """Runs `scene` beside a pod that gives one of `answers` to each request of a connection, whatever was asked."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()
            if not closes:
                await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pool = Pool(10.0)
        try:
            async with asyncio.timeout(SLACK_S):
                await scene(pool, Origin("127.0.0.1", server.sockets[0].getsockname()[1]))
        finally:
            pool.close()
            server.close()

    asyncio.run(run())


@asynccontextmanager
async def asked(pool: Pool, origin: Origin) -> AsyncIterator[tuple[Connection, Head]]:
    async with pool.connection(origin) as connection:
        connection.send(request_head("GET", b"/", origin, [], None))
        head = await connection.head()
        assert head is not None
        yield connection, head


async def answer(pool: Pool, origin: Origin) -> tuple[int, bytes]:
    async with asked(pool, origin) as (connection, head):
        return head.status, await connection.rest()


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 999 Whatever\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nyes",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n3\r\nyes\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * (MAX_HEAD_BYTES + (1 << 19)),
        b"HTTP/1.1 200 OK\r\n" + b"x: 1\r\n" * (MAX_HEAD_BYTES // 3),
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * (1 << 16),
    ],
)
def test_what_is_no_answer_breaks_the_connection(said: bytes) -> None:
    async def scene(pool: Pool, origin: Origin) -> None:
        faults: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        with pytest.raises(ConnectionBroken):
            await answer(pool, origin)
        assert faults == []

    play(scene, said)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-le"])
def test_a_connection_that_ends_before_its_head_is_broken(said: bytes) -> None:
    async def scene(pool: Pool, origin: Origin) -> None:
        with pytest.raises(ConnectionBroken):
            await answer(pool, origin)

    play(scene, said, closes=True)


def test_interim_answers_are_passed_over() -> None:
    async def scene(pool: Pool, origin: Origin) -> None:
        assert await answer(pool, origin) == (200, b"yes")

    play(scene, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK)


def test_a_body_that_is_shorter_than_its_length_is_broken_after_what_has_come() -> None:
    async def scene(pool: Pool, origin: Origin) -> None:
        async with asked(pool, origin) as (connection, _):
            assert await connection.read() == b"half"
            with pytest.raises(ConnectionBroken):
                await connection.read()

    play(scene, b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nhalf", closes=True)


@pytest.mark.parametrize("surplus", [b"more", OK.replace(b"yes", b"no!"), OK[:20]])
def test_what_a_pod_says_beyond_its_answer_is_no_answer_to_the_next_request(surplus: bytes) -> None:
    async def scene(pool: Pool, origin: Origin) -> None:
        for _ in range(3):
            assert await answer(pool, origin) == (200, b"yes")

    play(scene, OK + surplus)


def test_what_a_pod_says_unasked_on_an_unused_connection_ends_it() -> None:
    async def scene(pool: Pool, origin: Origin) -> None:
        async with asked(pool, origin) as (connection, _):
            assert await connection.rest() == b"yes"
        connection.data_received(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        async with pool.connection(origin) as other:
            assert other is not connection

    play(scene, OK)


def test_an_answer_that_should_be_short_is_not_gathered_without_end() -> None:
    async def scene(pool: Pool, origin: Origin) -> None:
        with pytest.raises(UpstreamError, match="larger than"):
            await answer(pool, origin)

    play(scene, b"HTTP/1.1 503 X\r\ncontent-length: 999999999\r\n\r\n" + b"x" * (MAX_WHOLE_BYTES + 1))


def test_a_pod_that_takes_no_connection_is_not_waited_for() -> None:
    async def run() -> None:
        with socket.socket() as deaf:  # its queue of connections is full
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            waiting = [socket.socket() for _ in range(4)]
            for client in waiting:
                client.setblocking(False)
                client.connect_ex(deaf.getsockname())
            await asyncio.sleep(0.1)
            with pytest.raises(ConnectFailed, match=r"within 0\.2 s"):
                await connect(Origin(*deaf.getsockname()), 0.2)
            for client in waiting:
                client.close()

    asyncio.run(run())


# --- through the router


def first(odd: Script) -> Script:
    """For several pods: whichever is asked first does `odd`, and then all answer."""
    has_begun = False

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal has_begun
        answer, has_begun = says_yes if has_begun else odd, True
        await answer(asked, writer)

    return script


def test_a_pod_that_lives_but_never_answers_loses_its_request_to_another() -> None:
    script, options = first(never), {"upstream.header_timeout_s": "1"}
    with scripted(script, script) as pods, routing(*[pod.backend for pod in pods], **options) as router:
        assert router.post(chat_body("Hello")).json() == {"said": "yes"}
        assert [len(pod.asked) for pod in pods] == [1, 1]
        assert router.metrics()["retries_total{silent}"] == 1
        eventually(lambda: sum(pod.left for pod in pods) == 1)
        eventually(router.is_idle)


def test_a_stream_that_stands_still_ends_in_an_error_event() -> None:
    async def begins(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await start_events(writer)
        await send_chunk(writer, b'data: {"n": 1}\n\n')
        await asyncio.sleep(3600)

    with scripted(begins) as (pod,), routing(pod.backend, **{"upstream.idle_timeout_s": "1"}) as router:
        token, error, done = sse_data(router.post(chat_body("Hello", stream=True)).text)
        assert (token, error["error"]["code"], done) == ({"n": 1}, "upstream_failed", "[DONE]")
        eventually(lambda: pod.left == 1)
        eventually(router.is_idle)


def test_what_a_pod_has_refused_is_not_expected_to_be_there() -> None:
    with scripted(refusal(400, "bad_picture")) as (pod,), routing(pod.backend, **{"cache.poll_ms": "60000"}) as router:
        body = chat_body(picture(1), "What is it?")
        assert router.post(body).status_code == 400
        assert router.decision(body)["cached_media"] == 0
        assert router.metrics()["index_expected"] == 0


def test_a_request_that_is_tried_again_is_counted_once_but_for_its_decisions() -> None:
    script = first(hangs_up)
    with scripted(script, script) as pods, routing(*[pod.backend for pod in pods]) as router:
        assert router.post(chat_body(picture(1), picture(2), "What is it?")).status_code == 200
        counts = router.metrics()
        assert sum(count for name, count in counts.items() if name.startswith("decisions_total")) == 2
        assert counts["media_total"] == 2


@pytest.mark.parametrize("said", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-le", b"HTTP/1.1 999 X\r\n\r\n"])
def test_what_is_no_answer_is_tried_at_another_pod(said: bytes) -> None:
    async def says(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        await writer.drain()
        raise HangUp

    script = first(says)
    with scripted(script, script) as pods, routing(*[pod.backend for pod in pods]) as router:
        assert router.post(chat_body("Hello")).json() == {"said": "yes"}
        assert [len(pod.asked) for pod in pods] == [1, 1]
        assert router.metrics()["retries_total{broken}"] == 1
        eventually(router.is_idle)
        assert "Traceback" not in router.log()
