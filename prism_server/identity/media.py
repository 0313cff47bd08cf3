"""Identity of one medium: what it is (content id) and what the model is shown of it (layout digest)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from prism_server.identity.digest import Digest, Field, framed_digest


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """What a request may say about how one medium is shown. `None` means the server's default.

    `min_pixels` and `max_pixels` are areas in pixels after resizing.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None

    def fields(self) -> tuple[Field, ...]:
        return (self.min_pixels, self.max_pixels)


def content_id(kind: str, data: bytes | memoryview) -> Digest:
    """Identity of the encoded bytes of a medium of `kind` ("image"). The base64 spelling never matters."""
    return framed_digest("content", (kind, data))


def link_digest(url: str) -> Digest:
    """Name of a link, until somebody has fetched it and knows the content. The text as the request spells it."""
    return framed_digest("link", (url,))


def layout_digest(kind: str, options: Mapping[str, Field]) -> Digest:
    """Identity of everything that turns the bytes into pixels and tokens: limits, patch, merge, background, sampling.

    `options` holds resolved values (no "default"); the order of its keys does not matter.
    """
    flat: list[Field] = [kind]
    for name in sorted(options):
        flat += [name, options[name]]
    return framed_digest("layout", flat)
