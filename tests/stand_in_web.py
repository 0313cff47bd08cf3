"""A web server that answers what a test tells it to, byte by byte: well, wrongly, slowly, without an end."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field

WAIT_S = 60

Piece = bytes | float
"""Bytes to send, or seconds to wait."""


@dataclass(frozen=True)
class Asked:
    """One request; names of headers in lower case."""

    path: str
    headers: dict[str, str]


Page = Callable[[Asked], Iterable[Piece]]


def answer(body: bytes = b"", status: int = 200, **headers: str) -> bytes:
    """A whole answer. `content_type="image/png"` is the header `content-type`."""
    said = {"content-length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"HTTP/1.1 {status} whatever", *(f"{name}: {value}" for name, value in said.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode() + body


def always(*pieces: Piece) -> Page:
    return lambda _: pieces


def redirect(location: str, status: int = 302) -> Page:
    return always(answer(status=status, location=location))


def as_long_as_unchanged(body: bytes, etag: str, **headers: str) -> Page:
    """304 to those who name the tag."""

    def page(asked: Asked) -> Iterable[Piece]:
        if asked.headers.get("if-none-match") == etag:
            return [answer(status=304, content_length="", etag=etag, **headers)]
        return [answer(body, etag=etag, **headers)]

    return page


@dataclass
class Site:
    """What is served, and what was asked for. `pages` may change while it runs."""

    tls: ssl.SSLContext | None = None
    pages: dict[str, Page] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    @property
    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            asked = Asked(head[0].split(" ")[1], headers)
            self.asked.append(asked)
            for piece in self.pages.get(asked.path, always(answer(status=404)))(asked):
                if isinstance(piece, bytes):
                    writer.write(piece)
                    await writer.drain()
                else:
                    await asyncio.sleep(piece)


@contextmanager
def site(tls: ssl.SSLContext | None = None) -> Iterator[Site]:
    """On the loopback, in a thread, on a port of the system's choice. At the end nothing of it is left to be collected:
    that would be logged in the middle of another test."""
    served = Site(tls)
    running: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def run() -> None:
        stop = asyncio.Event()
        server = await asyncio.start_server(served.handle, "127.0.0.1", 0, ssl=tls)
        served.port = server.sockets[0].getsockname()[1]
        running.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()
        server.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    loop, stop = running.result(WAIT_S)
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
