"""TCP sockets: one to listen on, and peers that are gone without a word."""

from __future__ import annotations

import socket

from prism_server.errors import StartupError

BACKLOG = 4096
CLIENT_TIMEOUT_S = 60.0
"""For a client whose turn it is: to send more of its request, to take more of its answer."""
MAX_HEAD_BYTES = 1 << 16
"""Of a request line with its headers, unless a listener has another bound."""
CLIENT_IDLE_S, CLIENT_EVERY_S, CLIENT_PROBES = 15, 15, 3
"""Clients come over networks that pause for seconds: they are given up after a minute."""


def bind(host: str, port: int, option: str) -> socket.socket:
    """A listening TCP socket; port 0 lets the system choose. StartupError names the `option`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    notice_lost_peer(bound, CLIENT_IDLE_S, CLIENT_EVERY_S, CLIENT_PROBES)  # connections inherit it
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


def notice_lost_peer(connected: socket.socket, idle_s: int, every_s: int, probes: int) -> None:
    """A host that is gone without a word breaks the connection after `idle_s + every_s * probes`, whatever is being
    waited for: an answer to probes while it is idle, or to what was sent."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle_s),
        ("TCP_KEEPINTVL", every_s),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", 1000 * (idle_s + every_s * probes)),
    ):
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
