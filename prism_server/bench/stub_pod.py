"""A pod that costs nothing: it reads a request and answers at once, or streams at a steady pace. For measuring what
stands before it.

Run as a process: `python -m prism_server.bench.stub_pod TOKENS_PER_S` prints its URL. A request to `/v1/*` whose query
is `tokens=N` streams N events, then ends; without one it gets a single JSON answer.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast
from urllib.parse import parse_qs, urlsplit

import msgspec
import uvloop

from prism_server.identity import KEY_VERSION

SLOTS = 20
"""Streams take turns within each period, as the steps of several engines would have it."""
JSON_ANSWER = msgspec.json.encode({"choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}}]})
TOKEN = (
    b"data: "
    + msgspec.json.encode({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": "word "}}]})
    + b"\n\n"
)
LAST = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


CACHE_ANSWER = _answer(
    msgspec.json.encode(
        {"key_version": KEY_VERSION, "namespace": "00" * 32, "layout": "00" * 32, "page_tokens": 64}
        | {"epoch": "stub", "cursor": 0, "snapshot": True, "load": {"phase": "ready"}}
    )
)


class Pacer:
    """Wakes each stream once a period."""

    def __init__(self, tokens_per_s: float) -> None:
        self._period_s = 1.0 / tokens_per_s
        self._slots: list[set[StubConnection]] = [set() for _ in range(SLOTS)]
        self._next = 0

    def add(self, stream: StubConnection) -> None:
        self._next = (self._next + 1) % SLOTS
        self._slots[self._next].add(stream)

    def remove(self, stream: StubConnection) -> None:
        for slot in self._slots:
            slot.discard(stream)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        at_s = loop.time()
        while True:
            for slot in self._slots:
                at_s += self._period_s / SLOTS
                await asyncio.sleep(max(0.0, at_s - loop.time()))
                for stream in tuple(slot):
                    stream.step()


class StubConnection(asyncio.Protocol):
    """One request after the other; heads are taken apart by hand."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._target = ""
        self._missing_bytes: int | None = None
        self._tokens_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, error: Exception | None) -> None:
        self._pacer.remove(self)
        self._transport = None

    def data_received(self, data: bytes) -> None:
        if self._missing_bytes is None:
            self._head += data
            head, blank, data = self._head.partition(b"\r\n\r\n")
            if not blank:
                return
            self._head = b""
            line, *fields = head.decode("latin-1").split("\r\n")
            self._target = line.split(" ")[1]
            named = dict(field.lower().split(": ", 1) for field in fields)
            self._missing_bytes = int(named.get("content-length", "0"))
        self._missing_bytes -= len(data)
        if self._missing_bytes <= 0:
            self._missing_bytes = None
            self._respond()

    def _respond(self) -> None:
        assert self._transport is not None
        parts = urlsplit(self._target)
        if parts.path == "/internal/cache":
            self._transport.write(CACHE_ANSWER)
            return
        self._tokens_left = int(parse_qs(parts.query).get("tokens", ["0"])[0])
        if self._tokens_left:
            self._transport.write(STREAM_HEAD)
            self._pacer.add(self)
        else:
            self._transport.write(_answer(JSON_ANSWER))

    def step(self) -> None:
        """The next event of a stream."""
        assert self._transport is not None
        self._tokens_left -= 1
        if self._tokens_left >= 0:
            self._transport.write(_chunk(TOKEN))
        else:
            self._transport.write(_chunk(LAST) + b"0\r\n\r\n")
            self._pacer.remove(self)


async def serve(tokens_per_s: float) -> None:
    pacer = Pacer(tokens_per_s)
    server = await asyncio.get_running_loop().create_server(lambda: StubConnection(pacer), "127.0.0.1", 0, backlog=4096)
    host, port = server.sockets[0].getsockname()
    print(f"stub pod on http://{host}:{port}", flush=True)
    await pacer.run()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(float(sys.argv[1])))
