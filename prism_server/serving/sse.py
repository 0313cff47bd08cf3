"""Server-sent events (WHATWG HTML, section 9.2): framing, and a response whose every byte is sent by one coroutine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.types import Send

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back
)
DONE_FRAME = b"data: [DONE]\n\n"


def frame(data: Any, event: str | None = None) -> bytes:
    """One event. JSON has no raw line break, so a single `data:` line holds it."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventSender:
    """Sends frames of one open response."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, frames: bytes) -> None:
        if frames:
            await self._send({"type": "http.response.body", "body": frames, "more_body": True})


@asynccontextmanager
async def event_stream(send: Send) -> AsyncIterator[EventSender]:
    """An open event-stream response for the length of the block; it ends properly only if the block does."""
    await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
    yield EventSender(send)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
