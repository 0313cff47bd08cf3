"""Server-sent events (WHATWG HTML, section 9.2): what every stream has in common."""

from __future__ import annotations

STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back
)
COMMENT = b": waiting\n\n"
"""Says nothing to a client, and to proxies that the stream lives."""
DONE_FRAME = b"data: [DONE]\n\n"
"""The end of a stream in OpenAI's form."""
