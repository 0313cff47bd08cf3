"""Headers that a router and its engines both know."""

from __future__ import annotations

import uuid

ROUTER = b"x-prism-router"
"""Tells an engine that comments for a client that waits are the router's: the engine's own would be its first byte,
after which the router can ask nobody else."""
REQUEST_ID = b"x-request-id"
MAX_REQUEST_ID_CHARACTERS = 128

CLOSE = (b"connection", b"close")
JSON = (b"content-type", b"application/json")
METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format."""


def request_id_of(given: bytes | None) -> bytes:
    """The client's own where it is harmless to repeat, else a new one."""
    if given and len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.decode().isprintable():
        return given
    return uuid.uuid4().hex.encode()
