"""One line in the log for each request: what was asked, how it ended, what it cost."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.types import Scope

from prism_server.engine.messages import Usage

KEY = "prism.request_line"
"""Where the outermost layer leaves the line in the scope."""
CLIENT_LEFT = "client_left"
PLAIN_IN_PATHS = "/:@!$&'()*+,;="
"""RFC 3986, section 3.3: what need not be percent-encoded there, beside letters and digits."""

logger = logging.getLogger(__name__)


@dataclass
class RequestLine:
    """Filled in on the way; `write` once, at the end. The request's own id is the log's to add."""

    method: str
    path: str
    """Decoded: it may hold anything, also the end of a line."""
    status: int | None = None
    """None: the client left before there was an answer."""
    end: str = "ok"
    """Or the code of the error, also of one within a stream, or `client_left`."""
    engine_id: str = "-"
    """Of the engine's request; the answer's own `id` ends in it."""
    usage: Usage = field(default_factory=lambda: Usage(0))
    began_s: float = field(default_factory=time.monotonic)

    def write(self) -> None:
        logger.info(
            "%s %s %s end=%s engine_id=%s prompt_tokens=%d reused_tokens=%d answer_tokens=%d ms=%.0f",
            self.method,
            quote(self.path, PLAIN_IN_PATHS),
            self.status or "-",
            self.end,
            self.engine_id,
            self.usage.prompt_tokens,
            self.usage.cached_tokens,
            self.usage.completion_tokens,
            (time.monotonic() - self.began_s) * 1e3,
        )


def line_of(scope: Scope) -> RequestLine:
    """The line of the request; one that nobody will write where no outermost layer has begun one (the admin side)."""
    line: RequestLine = scope.setdefault(KEY, RequestLine(scope["method"], scope["path"]))
    return line
