"""The sockets: both are bound and answer before the model is loaded, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator, Sequence

import uvicorn
from starlette.types import ASGIApp

from prism_server.errors import StartupError

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than proxies in front keep theirs: else they send into a connection that is just being closed."""
CLOSE_TIMEOUT_S = 2
"""For connections that are still open when everybody has been answered or told off."""


class _Listener(uvicorn.Server):
    """uvicorn's server without its signal handlers: SIGTERM is the drain's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening TCP socket; port 0 lets the system choose. StartupError names the `option`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)  # who connects from now on waits for the event loop instead of being refused
    except (OSError, OverflowError) as error:
        bound.close()
        raise StartupError(f"{option}: cannot listen on {host}:{port}: {error}") from error
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def listening(pairs: Sequence[tuple[socket.socket, ASGIApp]]) -> AsyncIterator[None]:
    """Serves each application on its socket for the length of the block."""
    listeners = [(_listener(app), bound) for bound, app in pairs]
    tasks = [asyncio.create_task(listener.serve([bound])) for listener, bound in listeners]
    try:
        yield
    finally:
        for listener, _ in listeners:
            listener.should_exit = True
        await asyncio.gather(*tasks)


def _listener(app: ASGIApp) -> _Listener:
    return _Listener(
        uvicorn.Config(
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
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
    )
