"""The gate of the threads: do big bodies and many streams keep the engine's thread from its steps?

A server whose device only keeps time (all else is real) streams to many clients; meanwhile bodies of eight pictures
come in at a steady rate. Printed, as JSON, with the bodies and without: how late the owner's thread goes on after a
step, how late the machine makes a thread that nobody disturbs, how long the device had nothing to do, and what the
owner and the event loop computed.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pybase64
import uvloop
from PIL import Image

from prism_server.bench.arguments import positive, positive_number
from prism_server.cli_support import ArgumentParser, console_script

NUM_PICTURES = 8
READ_BYTES = 1 << 16
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What is measured, for `seconds` without bodies and as long with them."""

    num_streams: int = 64
    step_ms: float = 5.0
    bodies_per_s: float = 20.0
    body_bytes: int = 5_000_000
    fresh: bool = False
    seconds: float = 10.0
    checkpoint: Path | None = None


class Recorder:
    """Another process that keeps a record; `greeting` is its first line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.greeting = self._answer()

    def begin(self) -> None:
        self._say("begin")

    def report(self) -> dict[str, Any]:
        self._say("report")
        record: dict[str, Any] = json.loads(self._answer())
        return record

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the gate ended with code {self._process.wait()}")
        return line.strip()


@contextmanager
def recorder(module: str, *arguments: str) -> Iterator[Recorder]:
    """A process for the length of the block."""
    command = [sys.executable, "-m", f"prism_server.bench.{module}", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Recorder(process)
        finally:
            process.terminate()


class PictureBodies:
    """Requests of one token about eight pictures that fill a body, each with a question of its own.

    The pictures are PNGs of noise, the same ones each time; `fresh`: with other bytes behind their end, which makes
    them other contents that have to be decoded again.
    """

    def __init__(self, body_bytes: int, fresh: bool) -> None:
        noise = np.random.default_rng(0)
        side = math.isqrt(body_bytes * 3 // 4 // NUM_PICTURES // 3)
        shape = (side, side, 3)
        self._pictures = [_png(noise.integers(0, 256, shape, dtype=np.uint8)) for _ in range(NUM_PICTURES)]
        self._known = None if fresh else self._urls(0)

    def request(self, number: int) -> bytes:
        parts = [b'{"type":"image_url","image_url":{"url":"%s"}}' % url for url in self._known or self._urls(number)]
        parts.append(b'{"type":"text","text":"What is in picture %d?"}' % number)
        content = b",".join(parts)
        return http_post(b'{"messages":[{"role":"user","content":[%s]}],"max_tokens":1,"stream":true}' % content)

    def _urls(self, number: int) -> list[bytes]:
        end = number.to_bytes(8, "little")
        return [b"data:image/png;base64," + pybase64.b64encode(png + end) for png in self._pictures]


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def http_post(body: bytes) -> bytes:
    """A whole request on a connection of its own."""
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: gate\r\nConnection: close\r\nContent-Length:"
    return f"{head} {len(body)}\r\n\r\n".encode() + body


def stream_request(number: int) -> bytes:
    message = {"role": "user", "content": f"Stream {number}."}
    fields = {"messages": [message], "max_tokens": 30_000, "ignore_eos": True, "stream": True}
    return http_post(json.dumps(fields).encode())


async def exchange(address: tuple[str, int], request: bytes) -> float:
    """Sends `request` and reads the whole answer; seconds until its first byte. RuntimeError for another than 200."""
    reader, writer = await asyncio.open_connection(*address, limit=READ_BYTES)
    try:
        asked_s = time.perf_counter()
        writer.write(request)
        first = await reader.read(READ_BYTES)
        first_s = time.perf_counter()
        if not first.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a request of the gate was answered with {first[:300]!r}")
        while await reader.read(READ_BYTES):
            pass
        return first_s - asked_s
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class Gate:
    """A measurement under way."""

    plan: GatePlan
    server: Recorder
    bystander: Recorder

    @property
    def address(self) -> tuple[str, int]:
        url = urlsplit(self.server.greeting)
        return url.hostname or "", url.port or 0

    async def measure(self) -> dict[str, Any]:
        """Both halves. RuntimeError where a request is refused or a process ends."""
        plan, bodies = self.plan, PictureBodies(self.plan.body_bytes, self.plan.fresh)
        async with asyncio.TaskGroup() as streams:
            requests = map(stream_request, range(plan.num_streams))
            running = [streams.create_task(exchange(self.address, request)) for request in requests]
            await exchange(self.address, bodies.request(0))
            await asyncio.sleep(SETTLE_S)
            quiet = await self._half(None)
            busy = await self._half(bodies)
            for stream in running:
                stream.cancel()
        return {"plan": {**asdict(plan), "checkpoint": str(plan.checkpoint or "")}, "quiet": quiet, "busy": busy}

    async def _half(self, bodies: PictureBodies | None) -> dict[str, Any]:
        """The streams alone, or beside `bodies`."""
        for recording in (self.server, self.bystander):
            recording.begin()
        plan, started_s = self.plan, time.perf_counter()
        sent: list[asyncio.Task[float]] = []
        while (elapsed_s := time.perf_counter() - started_s) < plan.seconds:
            if bodies is None:
                await asyncio.sleep(plan.seconds - elapsed_s)
            else:
                request = bodies.request(len(sent) + 1)
                sent.append(asyncio.create_task(exchange(self.address, request)))
                await asyncio.sleep(max(0.0, len(sent) / plan.bodies_per_s - (time.perf_counter() - started_s)))
        waits_s = await asyncio.gather(*sent)
        seconds = time.perf_counter() - started_s
        return _summary(self.server.report(), self.bystander.report(), seconds, waits_s)


def _summary(
    record: dict[str, Any], bystander: dict[str, Any], seconds: float, waits_s: Sequence[float]
) -> dict[str, Any]:
    tokens = max(1, record["num_tokens"])
    return {
        "steps": len(record["late_ms"]),
        "late_ms": _quantiles(record["late_ms"]),
        "bystander_late_ms": _quantiles(bystander["late_ms"]),
        "idle_ms": _quantiles(record["idle_ms"]),
        "owner_cpu_share": record["owner_cpu_s"] / seconds,
        "loop_cpu_share": record["loop_cpu_s"] / seconds,
        "owner_cpu_us_per_token": record["owner_cpu_s"] / tokens * 1e6,
        "loop_cpu_us_per_token": record["loop_cpu_s"] / tokens * 1e6,
        "bodies": len(waits_s),
        "ttft_ms": _quantiles([wait_s * 1e3 for wait_s in waits_s]) if waits_s else None,
    }


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }


def run_gate(argv: Sequence[str]) -> int:
    """`prism-bench gate`."""
    plan = _plan(argv)
    options = [f"--step-ms={plan.step_ms}"]
    if plan.checkpoint is not None:
        options.append(f"--checkpoint={plan.checkpoint}")
    with (
        recorder("paced_server", *options) as server,
        recorder("bystander", str(plan.step_ms)) as bystander,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        print(json.dumps(runner.run(Gate(plan, server, bystander).measure()), indent=1))
    return 0


def _plan(argv: Sequence[str]) -> GatePlan:
    default, parser = GatePlan(), ArgumentParser("prism-bench gate", __doc__ or "")
    for name, kind, text in (
        ("num_streams", positive, "answers that stream all the while"),
        ("step_ms", positive_number, "time of a step of the device"),
        ("bodies_per_s", positive_number, "rate of the bodies in the second half"),
        ("body_bytes", positive, "size of a body"),
        ("seconds", positive_number, "length of each half"),
    ):
        value = getattr(default, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, default=value, metavar="N", help=f"{text} [default: {value}]")
    parser.add_argument("--fresh", action="store_true", help="bodies bring pictures that were never seen")
    parser.add_argument("--checkpoint", type=Path, metavar="DIRECTORY", help="whose tokenizer counts [default: demo]")
    return GatePlan(**vars(parser.parse_strictly(argv)))


if __name__ == "__main__":
    sys.exit(console_script("prism-bench gate")(run_gate)(None))
