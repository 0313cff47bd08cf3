"""The load client against servers of a few lines: chunks cut anywhere, many streams, and everything that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from prism_server.bench.client import AnswerFailed
from prism_server.bench.load_client import LoadClient
from prism_server.bench.stream_stats import StreamResult

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """HTTP/1.1 as far as the client needs it: `handle` answers each body on a connection that is kept."""

    def __init__(self, handle: Handler) -> None:
        self.heads: list[bytes] = []
        self.num_connections = 0
        self._handle = handle

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await self._handle(await reader.readexactly(length), writer)
        writer.close()


def event(chunk: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(chunk).encode()


def delta(**fields: object) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}], "usage": None})


def usage(tokens: int, cached: int | None = None) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
    return event({"choices": [], "usage": {"prompt_tokens": 50, "completion_tokens": tokens, **details}})


OPENING = delta(role="assistant", content="")
END = b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def ask(
    handle: Handler, count: int = 1, at_once: int = 1, timeout_s: float = 20.0
) -> tuple[list[StreamResult], Server]:
    server = Server(handle)

    async def talk() -> list[StreamResult]:
        async with server.running() as url, LoadClient(url, "m", "secret", timeout_s) as client:
            results: list[StreamResult] = []
            for _ in range(count // at_once):
                results += await asyncio.gather(*(client.send(b'{"n": 1}', "hot") for _ in range(at_once)))
            return results

    return asyncio.run(talk()), server


async def answer(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    writer.write(HEAD)
    for part in parts:
        writer.write(chunked(part))
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(b"0\r\n\r\n")


def test_tokens_are_chunks_with_text_and_the_opening_is_none() -> None:
    async def handle(body: bytes, writer: asyncio.StreamWriter) -> None:
        assert body == b'{"n": 1}'
        pieces = (OPENING, delta(content="a"), delta(content=""), delta(reasoning_content="c"), delta(), usage(7, 40))
        await answer(writer, *pieces, END)

    (result,), server = ask(handle)
    assert result.error == ""
    assert len(result.arrivals_s) == 3
    assert (result.num_tokens, result.prompt_tokens, result.cached_tokens) == (7, 50, 40)
    assert result.sent_s < result.first_s <= result.last_s
    assert server.heads[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"authorization: Bearer secret\r\n" in server.heads[0]


def test_a_stream_without_usage_counts_its_chunks() -> None:
    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        await answer(writer, OPENING, delta(content="a"), delta(content="b"), END)

    (result,), _ = ask(handle)
    assert (result.num_tokens, result.cached_tokens) == (2, 0)


def test_events_may_be_cut_anywhere_and_come_together() -> None:
    whole = (
        OPENING + delta(content="é") + b": a comment\n\n" + delta(content="b").replace(b"\n", b"\r\n") + usage(2) + END
    )

    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        await answer(writer, *(whole[i : i + 7] for i in range(0, len(whole), 7)))

    (result,), _ = ask(handle)
    assert (result.error, len(result.arrivals_s)) == ("", 2)


def test_sixty_four_streams_at_once_lose_no_token_and_keep_their_connections() -> None:
    async def handle(_: bytes, writer: asyncio.StreamWriter) -> None:
        await answer(writer, OPENING, *(delta(content=f"{i} ") for i in range(50)), usage(50, 1), END)

    results, server = ask(handle, count=192, at_once=64)
    assert [(result.error, len(result.arrivals_s), result.num_tokens) for result in results] == [("", 50, 50)] * 192
    assert server.num_connections == 64


async def _refuse(_: bytes, writer: asyncio.StreamWriter) -> None:
    reason = b'{"error": {"message": "too many requests"}}'
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: %d\r\n\r\n%b" % (len(reason), reason))


async def _break_off(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(delta(content="a")))
    await writer.drain()
    writer.close()


async def _fail_inside(_: bytes, writer: asyncio.StreamWriter) -> None:
    await answer(writer, delta(content="a"), event({"error": {"message": "the GPU is gone"}}), END)


async def _say_nothing(_: bytes, writer: asyncio.StreamWriter) -> None:
    await answer(writer, OPENING, usage(0), END)


async def _speak_nonsense(_: bytes, writer: asyncio.StreamWriter) -> None:
    await answer(writer, b"data: {oops\n\n")


async def _never_answer(_: bytes, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("handle", "timeout_s", "reason"),
    [
        (_refuse, 20.0, "HTTP 429: too many requests"),
        (_break_off, 20.0, "closed before"),
        (_fail_inside, 20.0, "the GPU is gone"),
        (_say_nothing, 20.0, "no token"),
        (_speak_nonsense, 20.0, "not a stream"),
        (_never_answer, 0.5, "no end after 0.5 s"),
    ],
)
def test_whatever_goes_wrong_is_the_results_error_and_the_next_request_is_sent(
    handle: Handler, timeout_s: float, reason: str
) -> None:
    results, server = ask(handle, count=2, timeout_s=timeout_s)
    assert [reason in result.error for result in results] == [True, True]
    assert len(server.heads) == 2


def test_a_server_that_is_not_there_is_an_error_too() -> None:
    async def talk() -> StreamResult:
        async with LoadClient("http://127.0.0.1:9", "m") as client:
            return await client.send(b"{}", "cold")

    assert asyncio.run(talk()).error
    with pytest.raises(AnswerFailed, match="http://host:port"):
        LoadClient("https://host", "m")
