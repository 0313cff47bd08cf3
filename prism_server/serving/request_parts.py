"""Messages of a request with the bytes of their media.

Base64 is undone here, so this runs in a worker thread, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prism_server.media.data_url import data_url_bytes
from prism_server.media.item import MediaItem
from prism_server.media.limits import MediaLimits
from prism_server.media.messages import MediaSource, Message, split_messages
from prism_server.serving.early_media import EarlyMedia


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the template and, in order of `MediaContent.media_index`, their media."""

    messages: tuple[Message, ...]
    media: tuple[MediaItem, ...]


def read_messages(messages: Sequence[Any], limits: MediaLimits, early: EarlyMedia | None = None) -> Conversation:
    """The conversation of a request. BadRequest names the part: `messages[1].content[0].image_url.url`.

    `early`: media that were taken out of the body before it was parsed.
    """
    said = split_messages(messages, limits)
    taken = early or EarlyMedia()
    return Conversation(said.messages, tuple(_item(source, limits, taken) for source in said.sources))


def _item(source: MediaSource, limits: MediaLimits, early: EarlyMedia) -> MediaItem:
    data = early.take(source.url)
    if data is None:
        data = data_url_bytes(source.url, limits, source.param)
    return MediaItem(source.kind, data, source.options, source.param)
