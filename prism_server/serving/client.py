"""Answers end where their clients do."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from prism_server.http.asgi import Receive, until_disconnected


async def until_client_leaves(receive: Receive, answer: Coroutine[Any, Any, None]) -> bool:
    """Runs `answer` until it ends or the client disconnects, whichever comes first; False if the client left.

    The answer is cancelled wherever it is (in a queue, preparing, streaming) and has cleaned up when this returns.
    `receive` must have no body left to give. What the answer raises is raised here.
    """
    answering = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(until_disconnected(receive))
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
