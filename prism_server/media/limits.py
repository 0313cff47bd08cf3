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
    max_video_s: float = 3600.0
    max_video_decoded_pixels: int = 100_000_000_000
    """Width times height of all frames that a clip makes the decoder go through."""
    max_listed_frames: int = 1024
    """Pictures of a clip that comes as a list of them."""

    def __post_init__(self) -> None:
        pixels = min(self.max_decoded_pixels, self.max_video_decoded_pixels)
        sizes = (self.max_item_bytes, pixels, self.max_aspect_ratio, self.max_listed_frames)
        if self.max_items < 0 or min(sizes) < 1 or self.max_video_s <= 0:
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

    def check_listed_frames(self, num_frames: int, param: str) -> None:
        """Pictures of a clip that comes as a list."""
        if num_frames < 1:
            raise BadRequest("a list of frames must not be empty", param)
        if num_frames > self.max_listed_frames:
            reason = f"a list of {num_frames} frames; this server takes at most {self.max_listed_frames}"
            raise BadRequest(reason, param)

    def check_duration(self, duration_s: float, param: str) -> None:
        """Seconds of a clip, as far as it has been looked through."""
        if duration_s > self.max_video_s:
            reason = f"the clip is longer than {self.max_video_s:g} seconds, the most that this server takes"
            raise BadRequest(reason, param)

    def check_decoding(self, num_frames: int, width: int, height: int, param: str) -> None:
        """Frames of a clip that have to be decoded to get at those that are shown."""
        num_pixels = num_frames * width * height
        if num_pixels > self.max_video_decoded_pixels:
            raise BadRequest(
                f"the clip takes {num_frames} decoded frames of {width} x {height} = {num_pixels} pixels; "
                f"this server decodes at most {self.max_video_decoded_pixels}",
                param,
            )


def media_limits(settings: MediaSettings) -> MediaLimits:
    """The limits that the settings ask for."""
    return MediaLimits(
        max_items=settings.max_items,
        max_item_bytes=settings.max_item_bytes,
        max_decoded_pixels=settings.max_decoded_pixels,
        max_video_s=settings.max_video_s,
        max_video_decoded_pixels=settings.max_video_decoded_pixels,
        max_listed_frames=settings.max_listed_frames,
    )
