"""Messages of a request with the bytes of their media.

Base64 is undone here, so this runs in a worker thread, never on the event loop. Links are only named here: they are
fetched on the event loop, between `read_messages` and `ReadMessages.items`, while no thread waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_server.errors import BadRequest
from prism_server.media.data_url import EXAMPLE, data_url_bytes
from prism_server.media.item import MediaItem
from prism_server.media.limits import MediaLimits
from prism_server.media.link import NamedLink, is_link
from prism_server.media.messages import MediaSource, Message, split_messages
from prism_server.serving.early_media import EarlyMedia


@dataclass(frozen=True, slots=True)
class ReadMedium:
    """One medium. `pieces`: its bytes, or those of each frame of a list; None where a link has to be fetched."""

    source: MediaSource
    pieces: tuple[bytes | None, ...] = field(repr=False)

    def links(self, media_index: int) -> Iterator[NamedLink]:
        for i, piece in enumerate(self.pieces):
            if piece is None and self.source.frames:
                yield NamedLink(self.source.frames[i], f"{self.source.param}[{i}]", None)
            elif piece is None:
                yield NamedLink(self.source.url, self.source.param, media_index)

    def item(self, fetched: Mapping[str, bytes]) -> MediaItem:
        source = self.source
        urls = source.frames or (source.url,)
        data = tuple(fetched[url] if piece is None else piece for url, piece in zip(urls, self.pieces, strict=True))
        if source.frames:
            return MediaItem(source.kind, b"", source.options, source.param, data)
        return MediaItem(source.kind, data[0], source.options, source.param)


@dataclass(frozen=True, slots=True)
class ReadMessages:
    """Messages for the template and, in order of `MediaContent.media_index`, their media."""

    messages: tuple[Message, ...]
    media: tuple[ReadMedium, ...]

    @property
    def links(self) -> tuple[NamedLink, ...]:
        """What has to be fetched."""
        return tuple(link for i, medium in enumerate(self.media) for link in medium.links(i))

    def items(self, fetched: Mapping[str, bytes]) -> tuple[MediaItem, ...]:
        """The media, with the bytes of every link by its URL."""
        return tuple(medium.item(fetched) for medium in self.media)


def read_messages(
    messages: Sequence[Any], limits: MediaLimits, early: EarlyMedia | None = None, fetches_links: bool = False
) -> ReadMessages:
    """The messages of a request. BadRequest names the part: `messages[1].content[0].image_url.url`.

    `early`: media that were taken out of the body before it was parsed. Without `fetches_links` a link is refused.
    """
    said = split_messages(messages, limits)
    taken = early or EarlyMedia()

    def piece(url: str, param: str) -> bytes | None:
        data = taken.take(url)
        if data is None and is_link(url):
            if not fetches_links:
                raise _links_are_off(param)
            return None
        return data_url_bytes(url, limits, param) if data is None else data

    def pieces(source: MediaSource) -> tuple[bytes | None, ...]:
        if source.frames:
            return tuple(piece(url, f"{source.param}[{i}]") for i, url in enumerate(source.frames))
        return (piece(source.url, source.param),)

    return ReadMessages(said.messages, tuple(ReadMedium(source, pieces(source)) for source in said.sources))


def _links_are_off(param: str) -> BadRequest:
    reason = f"links are off on this server (fetch.hosts names no host); send the bytes as a data URL: {EXAMPLE}"
    return BadRequest(reason, param, code="links_off")
