"""Real routers and engines in processes of their own, pods that do what a test says, and requests to them."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from prism_server.bench.server_process import ServerProcess
from prism_server.identity import KEY_VERSION

CHAT = "/v1/chat/completions"
LOCAL = {"http.host": "127.0.0.1", "http.port": "0", "http.admin_host": "127.0.0.1", "http.admin_port": "0"}
QUICK = {"cache.poll_ms": "50", "discovery.meeting_s": "1", "placement.slow_start_s": "0.01"}
"""Pods have their whole share at once: with a tenth of it, one request seen a poll too late makes a pod look full."""
SLACK_S = 30.0


def eventually(holds: Callable[[], bool], timeout_s: float = SLACK_S) -> None:
    """Waits until `holds()`; fails after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        time.sleep(0.02)


class RouterProcess:
    """`prism-router` on ports of the system's choice; options are `{"cache.poll_ms": "50"}`."""

    def __init__(self, **options: str) -> None:
        arguments = [f"--{name}={value}" for name, value in (LOCAL | QUICK | options).items()]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prism_server.router.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("PRISM_")},
        )
        assert self.process.stdout is not None
        self.api, self.admin = re.findall(r"http://[^\s,]+", self.process.stdout.readline())
        self.http = httpx.Client(timeout=60.0)

    def post(self, body: Any, path: str = CHAT, **options: Any) -> httpx.Response:
        return self.http.post(self.api + path, json=body, **options)

    def state(self) -> dict[str, Any]:
        """What the router says of itself and of each pod."""
        answer: dict[str, Any] = self.http.get(f"{self.admin}/internal/pods").json()
        return answer

    def pod(self, name: str) -> dict[str, Any]:
        return next(pod for pod in self.state()["pods"] if pod["name"] == name)

    def explain(self, body: Any) -> dict[str, Any]:
        """Its decision for `body`, with every pod's case."""
        answer: dict[str, Any] = self.http.post(f"{self.admin}/debug/placement", json=body).json()
        return answer

    def decision(self, body: Any) -> dict[str, Any]:
        decision: dict[str, Any] = self.explain(body)["decision"]
        return decision

    def has_met(self, count: int) -> bool:
        """Whether that many pods can be given requests, and each has said what it holds."""
        state = self.state()
        accepting = state["stats"]["accepting_pods_now"]
        return bool(accepting == count and all(pod["cache_age_s"] is not None for pod in state["pods"]))

    def metrics(self) -> dict[str, float]:
        """`name{label}` -> value."""
        families = text_string_to_metric_families(self.http.get(f"{self.admin}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        named = {"".join([s.name, *map("{{{}}}".format, s.labels.values())]): s.value for s in samples}
        return {name.removeprefix("prism_router_"): value for name, value in named.items()}

    def is_idle(self) -> bool:
        """Every counter of what is under way is zero."""
        now = self.metrics()
        counters = ("open_requests", "in_flight", "buffered_bytes", "pod_in_flight")
        return not any(value for name, value in now.items() if name.startswith(counters))

    def log(self) -> str:
        """What it has logged so far."""
        file = self._log.fileno()  # read by position: the file's own is where the router writes
        return os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._log.close()


@contextmanager
def routing(*backends: str, **options: str) -> Iterator[RouterProcess]:
    """A router before `api|admin` pods, which it has met."""
    router = RouterProcess(**{"discovery.backends": ",".join(backends)} | options)
    try:
        eventually(lambda: router.has_met(len(backends)))
        yield router
    finally:
        router.close()


def held_port() -> socket.socket:
    """Bound to a port of 127.0.0.1 that the system gives to nobody else while this is open. Who names it can listen
    there, stop, and listen again."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


class Engine(ServerProcess):
    """A real engine on the bundled model. With `ports` it can be started again where it was."""

    def __init__(self, ports: tuple[int, int] = (0, 0), **options: str) -> None:
        small = {"model.threads": "1", "kv.memory_bytes": str(24 << 20), "engine.max_running_sequences": "16"}
        where = {"http.port": str(ports[0]), "http.admin_port": str(ports[1])}
        super().__init__(small | where | options)

    @property
    def backend(self) -> str:
        return f"{self.api_url}|{self.admin_url}"

    @property
    def name(self) -> str:
        """Under which a router with a list of pods knows it."""
        return self.api_url.removeprefix("http://")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def capacity(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.admin_url}/internal/capacity", timeout=60).json()
        return answer

    def is_idle(self) -> bool:
        now = self.capacity()
        live_pages = now["total_pages"] - now["free_pages"] - now["cached_idle_pages"]
        return not (now["running"] or now["waiting"] or now["inside"] or live_pages)


# --- pods that do what a test says


@dataclass
class Asked:
    """A request as a pod got it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


Script = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


class ScriptedPod:
    """A pod whose answers to `/v1/*` are a coroutine of the test's; those to polls are, too, where it sets one."""

    def __init__(self, script: Script) -> None:
        self.script, self.poll_script = script, self.tells_cache
        self.asked: list[Asked] = []
        self.num_polls = 0
        self.poll_headers: dict[str, str] = {}
        """Of the last poll."""
        self.left = 0
        """Answers that were not finished because the router hung up."""
        self.cache = EMPTY_CACHE
        self.num_connections = 0
        self._idle: set[asyncio.StreamWriter] = set()
        self._port = held_port()
        self.port = int(self._port.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait(10)

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def backend(self) -> str:
        return f"http://{self.name}|http://{self.name}"

    async def tells_cache(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        """Answers a poll."""
        await answer_json(writer, self.cache)

    def close_listener(self) -> None:
        """Nobody listens any more, and connections without a request break."""
        asyncio.run_coroutine_threadsafe(self._stop_listening(), self._loop).result(10)

    def close(self) -> None:
        """Nobody listens any more; open connections break."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._port.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        serving = asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=1 << 26)
        self._server = self._loop.run_until_complete(serving)
        started.set()
        self._loop.run_forever()

    async def _stop_listening(self) -> None:
        self._server.close()
        for writer in tuple(self._idle):
            writer.transport.abort()

    async def _stop(self) -> None:
        self._server.close()
        me = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not me]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        ahead = b""
        try:
            while True:
                self._idle.add(writer)
                asked = await _read_request(reader, ahead)
                self._idle.discard(writer)
                if asked.target.startswith(("/internal/", "/readyz")):
                    self.poll_headers, ahead = dict(asked.headers), b""
                    self.num_polls += 1
                    await self.poll_script(asked, writer)
                    continue
                self.asked.append(asked)
                script = asyncio.ensure_future(self.script(asked, writer))
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait({script, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not script.done():
                    self.left += 1
                    script.cancel()
                    return
                gone.cancel()
                (first,) = await asyncio.gather(gone, return_exceptions=True)
                ahead = first if isinstance(first, bytes) else b""  # the next request may have come by now
                script.result()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError, HangUp):
            pass
        finally:
            self._idle.discard(writer)
            writer.transport.abort()


class HangUp(Exception):
    """Raised by a script: the connection breaks."""


EMPTY_CACHE: dict[str, Any] = {
    "key_version": KEY_VERSION,
    "namespace": "00" * 32,
    "layout": "11" * 32,
    "page_tokens": 64,
    "epoch": "e",
    "cursor": 0,
    "snapshot": True,
    "load": {"phase": "ready"},
}


async def _read_request(reader: asyncio.StreamReader, ahead: bytes) -> Asked:
    """`ahead`: what has been read of it."""
    head = (ahead + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *fields = head.strip().split("\r\n")
    method, target, _ = line.split(" ")
    headers = [(name.lower(), value) for name, value in (field.split(": ", 1) for field in fields)]
    length = int(dict(headers).get("content-length", "0"))
    return Asked(method, target, headers, await reader.readexactly(length))


async def answer_json(writer: asyncio.StreamWriter, body: Any, status: int = 200, extra: str = "") -> None:
    data = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


async def start_events(writer: asyncio.StreamWriter, extra: str = "") -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{extra}transfer-encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    await writer.drain()


async def send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    """An empty one ends the answer."""
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
    await writer.drain()


def refusal(status: int, code: str, retry_after_s: int = 1) -> Script:
    """A pod that always answers so."""

    async def refuse(asked: Asked, writer: asyncio.StreamWriter) -> None:
        body = {"error": {"message": code, "type": "t", "param": None, "code": code}}
        await answer_json(writer, body, status, f"retry-after: {retry_after_s}\r\n")

    return refuse


async def says_yes(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Answers at once."""
    await answer_json(writer, {"said": "yes"})


async def hangs_up(asked: Asked, writer: asyncio.StreamWriter) -> None:
    raise HangUp


async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


@contextmanager
def scripted(*scripts: Script) -> Iterator[list[ScriptedPod]]:
    pods = [ScriptedPod(script) for script in scripts]
    try:
        yield pods
    finally:
        for pod in pods:
            pod.close()


# --- requests


def chat_body(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8} | fields


def picture(seed: int) -> dict[str, Any]:
    """A part with a picture that no other seed gives."""
    rng = np.random.default_rng(seed)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def bodies_for(router: RouterProcess, name: str) -> Iterator[dict[str, Any]]:
    """Questions about pictures whose home is that pod, without end. Ports decide who is whose home."""
    bodies = (chat_body(picture(seed), "What is it?") for seed in itertools.count(1_000_000))
    return (body for body in bodies if router.decision(body)["name"] == name)


def sse_data(text: str) -> list[Any]:
    """The events of a whole stream."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


STOP, CONTINUE, KILL, TERM = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL, signal.SIGTERM
