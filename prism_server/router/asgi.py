"""Whole answers, bodies counted in a budget, clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from prism_server.http.asgi import ClientLeft, Headers, Receive, Scope, Send, read_body, until_disconnected
from prism_server.http.byte_budget import ByteBudget
from prism_server.http.headers import JSON


async def send_whole(send: Send, status: int, body: bytes, headers: Headers = (JSON,)) -> None:
    """An answer in one piece."""
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, body: Any, status: int = 200, headers: Headers = ()) -> None:
    await send_whole(send, status, msgspec.json.encode(body), [JSON, *headers])


class Body:
    """A request's body, counted in the budget until `release`."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.data = bytearray()

    async def read(self, scope: Scope, receive: Receive, max_bytes: int) -> None:
        """Raises BadRequest (a 413 beyond `max_bytes`), Overloaded, ClientLeft."""
        await read_body(scope, receive, max_bytes, self._take)

    def _take(self, chunk: bytes) -> None:
        self._budget.take(len(chunk))
        self.data += chunk

    def checksum(self) -> int:
        """The same for equal bodies, and seldom for others; about a millisecond for each MB."""
        return zlib.crc32(self.data)

    def release(self) -> None:
        """Lets go of the bytes. Idempotent."""
        self._budget.give_back(len(self.data))
        self.data = bytearray()


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

    watching = asyncio.create_task(until_disconnected(receive))
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
