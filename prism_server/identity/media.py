"""Identity of one medium: what it is (content id) and what the model is shown of it (layout digest)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prism_server.identity.digest import Digest, Field, framed_digest


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """What a request may say about how one medium is shown. `None` means the server's default.

    `min_pixels` and `max_pixels` are areas in pixels after resizing; of a clip, summed over the frames that are shown.
    The rest is about clips: `fps` is the rate at which frames are taken from a file, and the rate of a list of frames;
    `sampling` is "even" or "scenes".
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    sampling: str | None = None

    def fields(self) -> tuple[Field, ...]:
        """What a key covers. What only clips have is named, and left out where it is not said."""
        fps = None if self.fps is None else repr(float(self.fps))
        clip = {"fps": fps, "min_frames": self.min_frames, "max_frames": self.max_frames, "sampling": self.sampling}
        said = [field for name, value in clip.items() if value is not None for field in (name, value)]
        return (self.min_pixels, self.max_pixels, *said)


def content_id(kind: str, data: bytes | memoryview) -> Digest:
    """Identity of the encoded bytes of a medium of `kind` ("image", "video"). The base64 spelling never matters."""
    return framed_digest("content", (kind, data))


def frames_id(frames: Iterable[bytes]) -> Digest:
    """Identity of a clip that came as a list of encoded pictures."""
    return framed_digest("content", ("frames", *frames))


def link_digest(url: str) -> Digest:
    """Name of a link, until somebody has fetched it and knows the content. The text as the request spells it."""
    return framed_digest("link", (url,))


@dataclass(frozen=True, slots=True)
class LinkContent:
    """What a link led to when a server last fetched it: its `link_digest`, and the content's id."""

    url_digest: Digest
    content_id: Digest


def layout_digest(kind: str, options: Mapping[str, Field]) -> Digest:
    """Identity of everything that turns the bytes into pixels and tokens: limits, patch, merge, background, sampling.

    `options` holds resolved values (no "default"); the order of its keys does not matter.
    """
    flat: list[Field] = [kind]
    for name in sorted(options):
        flat += [name, options[name]]
    return framed_digest("layout", flat)
