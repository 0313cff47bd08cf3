"""Errors as answers: the handlers that turn them into the one JSON shape, and what goes with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler, Scope

from prism_server.errors import BadRequest, EngineFault, PrismError
from prism_server.http.error_body import error_headers, error_object
from prism_server.serving.metrics import Metrics
from prism_server.serving.request_log import line_of


class NotReady(EngineFault):
    """The server is loading, draining, broken or too late: nothing is wrong with the request. HTTP 503, Retry-After."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


def refusal_reason(error: PrismError) -> str:
    """The label of `prism_refusals_total`: the error's code where it has one, else its kind."""
    code = getattr(error, "code", None)
    return code if isinstance(code, str) else error.kind


def error_response(error: PrismError) -> Response:
    """The whole HTTP answer of a refusal."""
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return json_response(error_object(error), error.status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def note_refusal(scope: Scope, metrics: Metrics, error: PrismError) -> None:
    """Counts the error, and leaves it for the request's line in the log."""
    reason = refusal_reason(error)
    metrics.refused(reason)
    line_of(scope).end = reason


def error_handlers(metrics: Metrics) -> Mapping[Any, ExceptionHandler]:
    """Every error that leaves a handler before its first byte becomes JSON in the one shape and is counted."""

    async def prism_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PrismError)
        note_refusal(request.scope, metrics, error)
        return error_response(error)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        line_of(request.scope).end = "not_found"
        return error_response(BadRequest(str(error.detail), status=error.status_code, code="not_found"))

    async def unforeseen(request: Request, error: Exception) -> Response:
        failure = PrismError(f"internal error: {type(error).__name__}")  # the log has the traceback
        note_refusal(request.scope, metrics, failure)
        return error_response(failure)

    return {PrismError: prism_error, HTTPException: http_error, Exception: unforeseen}
