"""Errors on the wire: one JSON shape for every refusal."""

from __future__ import annotations

from typing import Any

import msgspec

from prism_server.errors import PrismError


def error_object(error: PrismError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, as OpenAI's clients read it."""
    return {
        "error": {
            "message": error.reason,
            "type": error.kind,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }


def error_json(error: PrismError) -> bytes:
    """The same as it is sent."""
    return msgspec.json.encode(error_object(error))
