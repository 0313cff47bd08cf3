"""Server-sent events (WHATWG HTML, section 9.2): framing, and a response whose every byte is sent by one coroutine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from prism_server.http.asgi import Scope, Send
from prism_server.http.sse import STREAM_HEADERS

RAW_SEND = "prism.raw_send"
"""Where the outermost layer leaves the server's own `send` in the scope."""
COMMENT_EVERY_S = 15.0
"""Proxies cut what has been silent for a minute, some for thirty seconds."""


def frame(data: Any, event: str | None = None) -> bytes:
    """One event. JSON has no raw line break, so a single `data:` line holds it."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def raw_send(scope: Scope) -> Send | None:
    """The server's own `send`, past the layers of the application: they care about an answer's start only, and cost
    more than the frame itself."""
    send: Send | None = scope.get(RAW_SEND)
    return send


class EventSender:
    """Sends frames of one open response."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, frames: bytes) -> None:
        if frames:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})


@asynccontextmanager
async def event_stream(
    send: Send, raw: Send | None = None, headers: Iterable[tuple[bytes, bytes]] = ()
) -> AsyncIterator[EventSender]:
    """An open event-stream response for the length of the block; it ends properly only if the block does.

    It starts and ends through `send`; what is between goes through `raw` where there is one.
    """
    await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS, *headers]})
    yield EventSender(raw or send)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
