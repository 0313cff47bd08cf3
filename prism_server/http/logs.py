"""Log lines on stderr that say which request they are about; the same for router and engines."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]

REQUEST_ID: ContextVar[str] = ContextVar("prism_request_id", default="")
"""Of the request that a task, or a worker's call for it, is about. Every request has a task, and so a context, of its
own."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"


class WithRequestId(logging.Filter):
    """Puts the request's id before the message."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = REQUEST_ID.get()
        record.request = f"[{request_id}] " if request_id else ""
        return True


def log_to_stderr(level: LogLevel) -> None:
    """From now on Prism's own lines of `level` and above are written; those of libraries from warnings on."""
    handler = logging.StreamHandler()
    handler.addFilter(WithRequestId())
    chosen = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(chosen, logging.WARNING), format=FORMAT, handlers=[handler])
    logging.getLogger("prism_server").setLevel(chosen)
