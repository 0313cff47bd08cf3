"""Errors on the wire: one JSON shape for every refusal, and the headers that go with it."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import msgspec

from prism_server.errors import PrismError

DEFAULT_RETRY_AFTER_S = 1.0


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


def retry_after(seconds: float) -> tuple[bytes, bytes]:
    return b"retry-after", str(max(1, math.ceil(seconds))).encode()


def error_headers(error: PrismError) -> list[tuple[bytes, bytes]]:
    """Retry-After where trying again can help; on a 401 what is asked for (RFC 9110, section 11.6.1)."""
    match error.status:
        case HTTPStatus.TOO_MANY_REQUESTS | HTTPStatus.SERVICE_UNAVAILABLE:
            return [retry_after(getattr(error, "retry_after_s", DEFAULT_RETRY_AFTER_S))]
        case HTTPStatus.UNAUTHORIZED:
            return [(b"www-authenticate", b"Bearer")]
        case _:
            return []
