"""Server-sent events passed on (WHATWG HTML, section 9.2): whole ones only, so that the stream can always be ended
with an event of our own, and comments can be put in between."""

from __future__ import annotations

from prism_server.errors import PrismError
from prism_server.http.error_body import error_json
from prism_server.http.sse import DONE_FRAME

NATIVE_PATH = "/v1/generate"
LONGEST_EVENT_BYTES = 1 << 20
"""An event that is longer is passed on in pieces."""

_END = b"\n\n"


class WholeEvents:
    """Cuts a stream of bytes at the ends of events."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, piece: bytes) -> bytes:
        """The events that `piece` completes, perhaps none."""
        data = self._rest + piece if self._rest else piece
        if data.endswith(_END):
            self._rest = b""
            return data
        end = data.rfind(_END) + len(_END)
        if end < len(_END):
            end = len(data) if len(data) > LONGEST_EVENT_BYTES else 0
        self._rest = data[end:]
        return data[:end]

    def rest(self) -> bytes:
        """What an orderly end leaves over: an event without its blank line."""
        rest, self._rest = self._rest, b""
        return rest


def error_events(path: str, error: PrismError) -> bytes:
    """The last events of a stream that failed, as the engines send them."""
    return error_events_from(path, error_json(error))


def error_events_from(path: str, body: bytes) -> bytes:
    """The same from an error's JSON."""
    data = b"data: " + body.replace(b"\r", b"").replace(b"\n", b" ") + _END
    return b"event: error\n" + data if path == NATIVE_PATH else data + DONE_FRAME
