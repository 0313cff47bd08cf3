"""Pods that do what a test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from router_http_support import held_port

from prism_server.identity import KEY_VERSION

WAIT_S = 60


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
        assert started.wait(WAIT_S)

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
        asyncio.run_coroutine_threadsafe(self._stop_listening(), self._loop).result(WAIT_S)

    def close(self) -> None:
        """Nobody listens any more; open connections break."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
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
                asked, ahead = await _read_request(reader, ahead), b""
                self._idle.discard(writer)
                if asked.target.startswith(("/internal/", "/readyz")):
                    self.poll_headers = dict(asked.headers)
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


async def engine_dies(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """What a real engine's last words are to those inside."""
    error = {"message": "the engine stopped: X", "type": "engine_error", "param": None, "code": None}
    await answer_json(writer, {"error": error}, 503, "retry-after: 1\r\n")


async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


async def until(holds: Callable[[], bool]) -> None:
    """For scripts that wait for what happens elsewhere."""
    while not holds():
        await asyncio.sleep(0.01)


@contextmanager
def scripted(*scripts: Script) -> Iterator[list[ScriptedPod]]:
    pods = [ScriptedPod(script) for script in scripts]
    try:
        yield pods
    finally:
        for pod in pods:
            pod.close()
