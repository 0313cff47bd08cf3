"""What the router costs: time added to a request, and streams kept open, beside direct calls in the same run.

The pod is a stub that answers at once, so that nothing but the way there and back is measured. Client, router and stub
are a process each.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast
from urllib.parse import urlsplit

import httpx
import uvloop

from prism_server.bench.client import user_message
from prism_server.bench.processes import running
from prism_server.bench.report import table

CHAT = "/v1/chat/completions"
SMALL_BODY_BYTES = 2000
PICTURES, PICTURE_BYTES = 8, 480_000
WARM_UP = 5
OPENING_S = 8.0
"""Streams are opened over at most so long, not all at one moment."""
LIVEZ_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class RouterPlan:
    rounds: int = 200
    num_streams: int = 2000
    tokens_per_s: float = 10.0
    stream_s: float = 20.0
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Of one stream."""
        return int(self.tokens_per_s * self.stream_s)

    @property
    def num_pieces(self) -> int:
        """Of all streams."""
        return self.num_streams * self.num_tokens


@dataclass(frozen=True, slots=True)
class Added:
    """Milliseconds from sending a request to the last byte of its answer."""

    name: str
    body_bytes: int
    direct_p50_ms: float
    direct_p99_ms: float
    routed_p50_ms: float
    routed_p99_ms: float
    added_p50_ms: float
    """Median of the differences of pairs."""
    router_cpu_ms: float
    """Of the router's process, for one request; unlike times, hardly changed by what else the machine does."""


@dataclass(frozen=True, slots=True)
class Streams:
    """`num_finished` of `num_opened` streams came to their end; gaps between two pieces of one stream, in ms."""

    name: str
    num_opened: int
    num_finished: int
    pieces_per_s: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float
    livez_p50_ms: float
    livez_p99_ms: float
    router_cpu_us: float | None
    """Of the router's process, for one piece, opening included; None for direct streams."""


@dataclass(frozen=True, slots=True)
class RouterCosts:
    added: tuple[Added, ...]
    streams: tuple[Streams, ...]

    def table(self) -> str:
        """Milliseconds, and microseconds where it says so."""
        times = table(
            ("request", "direct p50", "p99", "routed p50", "p99", "added p50", "router CPU"),
            [
                (
                    a.name,
                    *_fixed(2, a.direct_p50_ms, a.direct_p99_ms, a.routed_p50_ms, a.routed_p99_ms),
                    *_fixed(2, a.added_p50_ms, a.router_cpu_ms),
                )
                for a in self.added
            ],
        )
        streams = table(
            (
                "streams",
                "opened",
                "finished",
                "pieces/s",
                "gap p50",
                "p99",
                "max",
                "livez p50",
                "p99",
                "router CPU, us",
            ),
            [
                (
                    s.name,
                    s.num_opened,
                    s.num_finished,
                    *_fixed(0, s.pieces_per_s),
                    *_fixed(1, s.gap_p50_ms, s.gap_p99_ms, s.gap_max_ms),
                    *_fixed(2, s.livez_p50_ms, s.livez_p99_ms, s.router_cpu_us),
                )
                for s in self.streams
            ],
        )
        return f"{times}\n\n{streams}"


def _fixed(digits: int, *values: float | None) -> tuple[str, ...]:
    return tuple("" if value is None else f"{value:.{digits}f}" for value in values)


@dataclass(frozen=True, slots=True)
class _Setup:
    """Base URLs."""

    stub: str
    router: str
    router_admin: str

    def router_cpu_s(self) -> float:
        """CPU time of the router's process so far."""
        text = httpx.get(f"{self.router_admin}/metrics").text
        return float(text.split("\nprocess_cpu_seconds_total ")[1].split("\n")[0])


def measure_router(plan: RouterPlan) -> RouterCosts:
    """Starts a stub and a router, measures, stops both. Raises StartupError, OSError."""
    with _running(plan.tokens_per_s) as setup:
        added = tuple(_added(name, body, setup, plan.rounds) for name, body in _bodies(plan.seed))
        direct = uvloop.run(_hold_streams("direct", setup.stub, plan))
        before_s = setup.router_cpu_s()
        routed = uvloop.run(_hold_streams("routed", setup.router, plan))
        cpu_us = 1e6 * (setup.router_cpu_s() - before_s) / max(1, plan.num_pieces)
    return RouterCosts(added, (direct, replace(routed, router_cpu_us=cpu_us)))


@contextmanager
def _running(tokens_per_s: float) -> Iterator[_Setup]:
    hosts = ["--http.host=127.0.0.1", "--http.admin_host=127.0.0.1"]
    ports = ["--http.port=0", "--http.admin_port=0"]
    with running("prism_server.bench.stub_pod", [str(tokens_per_s)]) as (stub,):
        arguments = ["--backends", f"{stub}|{stub}", *hosts, *ports, "--http.drain_timeout_s=0"]
        with running("prism_server.router.cli", arguments) as (router, admin):
            _wait_for_pods(router)
            yield _Setup(stub, router, admin)


def _wait_for_pods(url: str) -> None:
    deadline_s = time.monotonic() + 30
    caller = _Caller(url)
    while caller.post(b"{}") != 200:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the router has found no pod")
        time.sleep(0.1)


def _bodies(seed: int) -> Iterator[tuple[str, bytes]]:
    question = {"messages": [{"role": "user", "content": "x" * SMALL_BODY_BYTES}], "max_tokens": 16}
    yield "2 KB of text", json.dumps(question).encode()
    rng = random.Random(seed)
    pictures = [b"\xff\xd8" + rng.randbytes(PICTURE_BYTES) for _ in range(PICTURES)]
    message = user_message(pictures, "What is the total?")
    yield "5 MB, eight pictures", json.dumps({"messages": [message], "max_tokens": 16}).encode()


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 80


class _Caller:
    """A kept connection."""

    def __init__(self, url: str) -> None:
        self._http = http.client.HTTPConnection(*_address(url), timeout=60)

    def post(self, body: bytes) -> int:
        self._http.request("POST", CHAT, body, {"content-type": "application/json"})
        answer = self._http.getresponse()
        answer.read()
        return answer.status

    def timed_ms(self, body: bytes) -> float:
        started_s = time.perf_counter()
        status = self.post(body)
        took_ms = 1e3 * (time.perf_counter() - started_s)
        if status != 200:
            raise OSError(f"HTTP {status}")
        return took_ms


def _added(name: str, body: bytes, setup: _Setup, rounds: int) -> Added:
    """Pairs of calls, their order alternating."""
    direct, routed = _Caller(setup.stub), _Caller(setup.router)
    times: dict[_Caller, list[float]] = {direct: [], routed: []}
    before_s = setup.router_cpu_s()
    for i in range(WARM_UP + rounds):
        for caller in (direct, routed) if i % 2 else (routed, direct):
            times[caller].append(caller.timed_ms(body))
    cpu_ms = 1e3 * (setup.router_cpu_s() - before_s) / (WARM_UP + rounds)
    first, second = times[direct][WARM_UP:], times[routed][WARM_UP:]
    return Added(
        name,
        len(body),
        statistics.median(first),
        _p99(first),
        statistics.median(second),
        _p99(second),
        statistics.median(b - a for a, b in zip(first, second, strict=True)),
        cpu_ms,
    )


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98] if len(values) > 1 else values[0]


class _Stream(asyncio.Protocol):
    """One open stream; notes when pieces came."""

    def __init__(self, request: bytes, gaps_ms: list[float], on_end: asyncio.Queue[bool]) -> None:
        self._request, self._gaps_ms, self._on_end = request, gaps_ms, on_end
        self._last_s: float | None = None
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.num_pieces = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._last_s is not None:
            self._gaps_ms.append(1e3 * (now_s - self._last_s))
        self._last_s = now_s
        self.num_pieces += data.count(b"data: {")
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(b"0\r\n\r\n") and self._transport is not None:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_end.put_nowait(b"[DONE]" in self._tail)


async def _hold_streams(name: str, url: str, plan: RouterPlan) -> Streams:
    host, port = _address(url)
    loop = asyncio.get_running_loop()
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
    head = f"POST {CHAT}?tokens={plan.num_tokens} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    gaps_ms: list[float] = []
    ends: asyncio.Queue[bool] = asyncio.Queue()
    livez_ms: list[float] = []
    watching = asyncio.create_task(_watch_livez(url, livez_ms))
    started_s = time.perf_counter()
    streams: list[_Stream] = []
    for _ in range(plan.num_streams):
        _, stream = await loop.create_connection(lambda: _Stream(head + body, gaps_ms, ends), host, port)
        streams.append(stream)
        await asyncio.sleep(min(OPENING_S, plan.stream_s) / plan.num_streams)
    finished = [await ends.get() for _ in streams]
    took_s = time.perf_counter() - started_s
    watching.cancel()
    pieces = sum(stream.num_pieces for stream in streams)
    return Streams(
        name,
        len(streams),
        sum(finished),
        pieces / took_s,
        statistics.median(gaps_ms),
        _p99(gaps_ms),
        max(gaps_ms),
        statistics.median(livez_ms),
        _p99(livez_ms),
        None,
    )


async def _watch_livez(url: str, into_ms: list[float]) -> None:
    """Asks again and again, on one connection."""
    reader, writer = await asyncio.open_connection(*_address(url))
    while True:
        asked_s = time.perf_counter()
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.split(b":")[1]))
        into_ms.append(1e3 * (time.perf_counter() - asked_s))
        await asyncio.sleep(LIVEZ_EVERY_S)
