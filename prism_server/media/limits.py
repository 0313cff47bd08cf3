"""What one medium may cost, checked from its size and its header, before anything is decoded."""

from __future__ import annotations

from dataclasses import dataclass

from prism_server.errors import BadRequest
from prism_server.settings import MediaSettings

MAX_ASPECT_RATIO = 200
"""Longer side over shorter side. The Qwen-VL resize rule is not defined above it."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Bounds of what a request may bring. Every `check_*` raises BadRequest with `param` and both numbers."""

    max_items: int
    max_item_bytes: int
    max_decoded_pixels: int
    """Width times height of a picture as stored."""
    max_aspect_ratio: int = MAX_ASPECT_RATIO

    def __post_init__(self) -> None:
        if self.max_items < 0 or min(self.max_item_bytes, self.max_decoded_pixels, self.max_aspect_ratio) < 1:
            raise ValueError(f"media limits must be positive: {self}")

    def check_count(self, num_items: int, param: str) -> None:
        """Media in one request."""
        if num_items > self.max_items:
            raise BadRequest(f"{num_items} media in one request; this server takes at most {self.max_items}", param)

    def check_item_bytes(self, num_bytes: int, param: str) -> None:
        """Encoded bytes of one medium."""
        if num_bytes > self.max_item_bytes:
            raise BadRequest(
                f"the medium has more than {self.max_item_bytes} bytes, the most that this server takes", param
            )

    def check_picture(self, width: int, height: int, param: str) -> None:
        """Pixels of one picture, from its header."""
        if min(width, height) < 1:
            raise BadRequest(f"a picture of {width} x {height} pixels has nothing to show", param)
        if max(width, height) > self.max_aspect_ratio * min(width, height):
            raise BadRequest(
                f"a picture of {width} x {height} pixels is too long and thin: the longer side may be at most "
                f"{self.max_aspect_ratio} times the shorter",
                param,
            )
        if width * height > self.max_decoded_pixels:
            raise BadRequest(
                f"a picture of {width} x {height} has {width * height} pixels; "
                f"this server decodes at most {self.max_decoded_pixels}",
                param,
            )


def media_limits(settings: MediaSettings) -> MediaLimits:
    """The limits that the settings ask for."""
    return MediaLimits(
        max_items=settings.max_items,
        max_item_bytes=settings.max_item_bytes,
        max_decoded_pixels=settings.max_decoded_pixels,
    )
