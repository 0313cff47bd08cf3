"""The little of ASGI that is needed everywhere: its types, headers, and reading a body within bounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from prism_server.errors import BadRequest

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]


class ClientLeft(Exception):
    """Nobody is there any more to be answered."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first one of this name, which is in small letters."""
    return next((value for key, value in scope["headers"] if key == name), None)


async def read_body(scope: Scope, receive: Receive, max_bytes: int, take: Callable[[bytes], object]) -> None:
    """Hands the body to `take` as it comes: joining megabytes at the end would hold up the event loop.

    A declared length beyond `max_bytes` is a 413 before a byte is read, an undeclared one as soon as it shows.
    Raises BadRequest, ClientLeft, and what `take` raises.
    """
    declared = header(scope, b"content-length") or b""
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    num_bytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk = message.get("body", b"")
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        take(chunk)
        if not message.get("more_body", False):
            return


async def until_disconnected(receive: Receive) -> None:
    """Returns when the client has gone. `receive` must have no body left to give."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(f"the body is larger than {max_bytes} bytes, the limit", status=413, code="body_too_large")
