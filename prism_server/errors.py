"""Errors are types: what a request did wrong, what the server has no room for, what broke."""

from __future__ import annotations


class PrismError(Exception):
    """Base of every error that Prism raises on purpose; `reason` is text for the user."""

    status = 500
    kind = "internal_error"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BadRequest(PrismError):
    """The request itself cannot be served. HTTP 4xx; `param` names the offending field."""

    kind = "invalid_request_error"

    def __init__(self, reason: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(reason)
        self.param = param
        self.status = status
        self.code = code


class Overloaded(PrismError):
    """There is no room now. HTTP 429 with Retry-After."""

    status = 429
    kind = "overloaded_error"

    def __init__(self, reason: str, retry_after_s: int = 1) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class EngineFault(PrismError):
    """The engine cannot answer any more, or not yet. HTTP 503."""

    status = 503
    kind = "engine_error"


class StartupError(PrismError):
    """A process cannot start as configured. One line on stderr and exit code 2, no traceback."""

    kind = "startup_error"
