"""Media of a body, taken out before its JSON is parsed: nearly all of a body is base64, about which JSON has no say.

Parsing, copying and escaping that text costs several times what its decoding does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import pybase64

from prism_server.media.limits import MediaLimits

OPENING = b'"data:'
HEADER = re.compile(rb"data:[A-Za-z0-9.+/;=-]{0,127};base64,")
LEAST_PAYLOAD_BYTES = 1024
"""Shorter ones are as quickly parsed."""


@dataclass
class EarlyMedia:
    """Decoded bytes by the stand-in that took their data URL's place. One request's, one thread's.

    A stand-in holds a secret drawn after the body was there, so no text of the body can spell it.
    """

    bytes_of: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    taken: set[str] = field(default_factory=set)

    def take(self, url: str) -> bytes | None:
        """The bytes, if `url` is a stand-in."""
        data = self.bytes_of.get(url)
        if data is not None:
            self.taken.add(url)
        return data

    @property
    def all_taken(self) -> bool:
        """Whether every stand-in was read as what it stands for; else the body has to be read as it came."""
        return len(self.taken) == len(self.bytes_of)


def take_media_out(body: bytes, limits: MediaLimits) -> tuple[bytes, EarlyMedia]:
    """The JSON with stand-ins for its base64 data URLs, and their bytes. Only the plainest spelling is taken.

    What is no valid JSON stays invalid; what is spelled otherwise, or larger than `limits` allow, stays where it is.
    """
    secret, bytes_of = secrets.token_hex(16), dict[str, bytes]()
    pieces: list[memoryview | bytes] = []
    view, copied, at = memoryview(body), 0, 0
    while (start := body.find(OPENING, at)) >= 0:
        start += 1
        end = body.find(b'"', start)
        if end < 0:
            break
        at = end
        data = _decoded(body, view, start, end, limits)
        if data is not None:
            stand_in = f"{secret}{len(bytes_of)}"
            bytes_of[stand_in] = data
            pieces += [view[copied:start], stand_in.encode()]
            copied = end
    pieces.append(view[copied:])
    return b"".join(pieces), EarlyMedia(bytes_of)


def _decoded(body: bytes, view: memoryview, start: int, end: int, limits: MediaLimits) -> bytes | None:
    """Bytes of the data URL at [start, end); None unless it is plain base64 of a size that is allowed."""
    header = HEADER.match(body, start, end)
    if header is None:
        return None
    num_characters = end - header.end()
    if num_characters < LEAST_PAYLOAD_BYTES or num_characters * 3 // 4 > limits.max_item_bytes:
        return None
    try:
        return pybase64.b64decode(view[header.end() : end], validate=True)
    except ValueError:
        return None
