"""The client's side of a connection: reading its body within bounds, noticing that it has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.types import Receive

from prism_server.errors import BadRequest


async def read_body(request: Request, max_bytes: int) -> bytearray:
    """The whole body, put together as it comes: joining 100 MB at its end would hold up the event loop.

    A declared length beyond `max_bytes` is a 413 before a byte is read, an undeclared one as soon as it shows.
    Raises starlette's `ClientDisconnect` if the client goes away half-way.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            raise _too_large(max_bytes)
        body += chunk
    return body


def _too_large(max_bytes: int) -> BadRequest:
    return BadRequest(f"the body is larger than {max_bytes} bytes, the limit", status=413, code="body_too_large")


async def until_client_leaves(receive: Receive, answer: Coroutine[Any, Any, None]) -> bool:
    """Runs `answer` until it ends or the client disconnects, whichever comes first; False if the client left.

    The answer is cancelled wherever it is (in a queue, preparing, streaming) and has cleaned up when this returns.
    `receive` must have no body left to give. What the answer raises is raised here.
    """
    answering = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        has_left = not answering.done()
        answering.cancel()
        await asyncio.wait({answering})
    if answering.cancelled():
        return False
    answering.result()
    return not has_left


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
