"""Bytes by their usual multiples."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30
