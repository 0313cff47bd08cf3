"""One application on one socket: uvicorn's server without its signal handlers, since SIGTERM is the drain's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from prism_server.http.asgi import App
from prism_server.http.client_connection import ClientConnection, ListenerConfig
from prism_server.http.sockets import BACKLOG, CLIENT_TIMEOUT_S, MAX_HEAD_BYTES

KEEP_ALIVE_S = 75
"""Longer than proxies in front keep theirs: else they send into a connection that is just being closed."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Listener:
    """Answers from `start` to `close`."""

    def __init__(
        self,
        bound: socket.socket,
        app: App,
        longest_close_s: float,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
        max_head_bytes: int = MAX_HEAD_BYTES,
    ) -> None:
        """`longest_close_s` bounds `close`. A client that neither sends the rest of its request nor takes its answer
        for `client_timeout_s` loses its connection, with a 408 where nothing has been answered yet."""
        config = ListenerConfig(
            app,
            http=ClientConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(longest_close_s)),
        )
        config.client_timeout_s, config.max_head_bytes = client_timeout_s, max_head_bytes
        self._server = _Server(config)
        self._socket = bound
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    def shut(self) -> None:
        """Takes no new connection and closes those without a request; answers under way go on."""
        self._server.should_exit = True

    async def close(self) -> None:
        """`shut`, and waits for the last answer."""
        self.shut()
        if self._serving is not None:
            await self._serving
        self._socket.close()
