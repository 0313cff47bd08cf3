"""Headers that a router and its engines both know."""

from __future__ import annotations

ROUTER = b"x-prism-router"
"""Tells an engine that comments for a client that waits are the router's: the engine's own would be its first byte,
after which the router can ask nobody else."""
