"""Log lines on stderr that say which request they are about; the same for router and engines."""

from __future__ import annotations

import logging
import re
from contextvars import ContextVar
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]

REQUEST_ID: ContextVar[str] = ContextVar("prism_request_id", default="")
"""Of the request that a task, or a worker's call for it, is about. Every request has a task, and so a context, of its
own."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"


_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class OneRecord(logging.Formatter):
    """Nothing within a record looks like another one, or speaks to a terminal, whatever a client or an exception's text
    has brought in: further lines are indented, control characters are spelled out."""

    def format(self, record: logging.LogRecord) -> str:
        text = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], super().format(record))
        return text.replace("\n", "\n    ")


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
    handler.setFormatter(OneRecord(FORMAT))
    chosen = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(chosen, logging.WARNING), handlers=[handler])
    logging.getLogger("prism_server").setLevel(chosen)
