"""The server's sockets: both are bound and answer before the model is loaded, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from prism_server.http.asgi import App
from prism_server.http.listener import Listener

CLOSE_TIMEOUT_S = 2
"""For connections that are still open when everybody has been answered or told off."""


@contextlib.asynccontextmanager
async def listening(pairs: Sequence[tuple[socket.socket, App]]) -> AsyncIterator[None]:
    """Serves each application on its socket for the length of the block."""
    listeners = [Listener(bound, app, CLOSE_TIMEOUT_S) for bound, app in pairs]
    for listener in listeners:
        listener.start()
    try:
        yield
    finally:
        await asyncio.gather(*(listener.close() for listener in listeners))
