"""The little of ASGI that the router needs: its types, whole answers, reading a body within bounds, leaving clients."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import msgspec

from prism_server.errors import BadRequest, Overloaded, PrismError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")


class ClientLeft(Exception):
    """Nobody is there any more to be answered."""


def header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


async def send_whole(send: Send, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
    """An answer in one piece."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, body: Any, status: int = 200, headers: Headers = ()) -> None:
    await send_whole(send, status, msgspec.json.encode(body), [JSON, *headers])


def error_json(error: PrismError) -> bytes:
    """`{"error": {message, type, param, code}}`, as OpenAI's clients read it."""
    fields = {"message": error.reason, "type": error.kind}
    return msgspec.json.encode({"error": fields | {name: getattr(error, name, None) for name in ("param", "code")}})


class BufferBudget:
    """Bytes of bodies that the router may hold, over all requests."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.held_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises Overloaded."""
        if self.held_bytes + num_bytes > self._most_bytes:
            raise Overloaded(f"the router holds {self.held_bytes} bytes of bodies, the limit; try again later")
        self.held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes


class Body:
    """A request's body, counted in the budget until `release`."""

    def __init__(self, budget: BufferBudget) -> None:
        self._budget = budget
        self.data = bytearray()

    async def read(self, scope: Scope, receive: Receive, max_bytes: int) -> None:
        """Put together as it comes: joining megabytes at the end would hold up the event loop.

        A declared length beyond `max_bytes` is a 413 before a byte is read, an undeclared one as soon as it shows.
        Raises BadRequest, Overloaded, ClientLeft.
        """
        declared = header(scope, b"content-length") or b""
        if declared.isdigit() and int(declared) > max_bytes:
            raise _too_large(max_bytes)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            chunk = message.get("body", b"")
            if len(self.data) + len(chunk) > max_bytes:
                raise _too_large(max_bytes)
            self._budget.take(len(chunk))
            self.data += chunk
            if not message.get("more_body", False):
                return

    def checksum(self) -> int:
        """The same for equal bodies, and seldom for others; about a millisecond for each MB."""
        return zlib.crc32(self.data)

    def release(self) -> None:
        """Lets go of the bytes. Idempotent."""
        self._budget.give_back(len(self.data))
        self.data = bytearray()


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(f"the body is larger than {max_bytes} bytes, the limit", status=413, code="body_too_large")


@contextlib.asynccontextmanager
async def ends_when_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block, wherever it is, as soon as the client disconnects, and raises ClientLeft after it.

    `receive` must have no body left to give.
    """
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    def on_end(watching: asyncio.Task[None]) -> None:
        nonlocal has_left
        if not watching.cancelled():
            has_left = True
            task.cancel()

    watching = asyncio.create_task(_disconnected(receive))
    watching.add_done_callback(on_end)
    try:
        yield
        if has_left:
            await asyncio.sleep(0)  # the cancellation is on its way: it must not hit what comes after this block
    except asyncio.CancelledError:
        if not has_left or task.uncancel() > 0:
            raise
        raise ClientLeft from None
    finally:
        watching.remove_done_callback(on_end)
        watching.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
