"""The client's side of one request: what has been said to it so far, and what can still be said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prism_server.http.asgi import Send
from prism_server.http.headers import CLOSE, JSON, REQUEST_ID


class Downstream:
    """Sends one answer."""

    def __init__(self, send: Send, request_id: bytes, is_going: bool) -> None:
        self._send = send
        self._request_id = request_id
        self._is_going = is_going
        self._loop = asyncio.get_running_loop()
        self.status: int | None = None
        """Of the head that has been sent."""
        self.last_sent_s = self._loop.time()

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.status = status
        own = [(REQUEST_ID, self._request_id), *([CLOSE] if self._is_going else [])]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})

    async def data(self, data: bytes) -> None:
        """Waits while the client is slow."""
        self.last_sent_s = self._loop.time()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def whole(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (JSON,)) -> None:
        """An answer in one piece."""
        await self.start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.end(body)
