"""The router's sockets, and uvicorn on them without its signal handlers: SIGTERM is the drain's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from prism_server.errors import StartupError
from prism_server.router.asgi import App

BACKLOG = 4096
KEEP_ALIVE_S = 75
"""Longer than proxies in front keep theirs: else they send into a connection that is just being closed."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Listener:
    """One application on one socket. Raises StartupError, naming `option`, where it cannot listen."""

    def __init__(self, host: str, port: int, option: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise StartupError(f"{option}: cannot listen on {host}:{port}: {error}") from error
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self, app: App, longest_close_s: float) -> None:
        """Answers from now on. `longest_close_s` bounds `close`."""
        config = uvicorn.Config(
            app,
            http="httptools",
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
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([self._socket]))

    def shut(self) -> None:
        """Takes no new connection and closes those without a request; answers under way go on."""
        if self._server is not None:
            self._server.should_exit = True

    async def close(self) -> None:
        """`shut`, and waits for the last answer."""
        self.shut()
        if self._serving is not None:
            await self._serving
        self._socket.close()
