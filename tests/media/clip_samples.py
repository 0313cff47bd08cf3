"""The small processor that the tests of clips run with, and what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clip_making import Picture, png
from media_samples import CONFIG

from prism_server.identity import MediaOptions
from prism_server.media.item import MediaItem
from prism_server.media.limits import MediaLimits
from prism_server.media.pipeline import MediaPipeline
from prism_server.media.processor_config import PixelRange
from prism_server.media.sampling import Sampling
from prism_server.media.video_config import VideoProcessorConfig

CLIPS = VideoProcessorConfig(16, 2, 2, PixelRange(4096, 196_608), Sampling(2.0, 4, 12), max_tokens=12_288)
LIMITS = MediaLimits(max_items=64, max_item_bytes=16 << 20, max_decoded_pixels=100_000_000)


def clip(data: bytes, param: str = "messages", **options: Any) -> MediaItem:
    return MediaItem("video", data, MediaOptions(**options), param)


def frame_list(frames: Sequence[Picture], fps: float | None = 2.0, **options: Any) -> MediaItem:
    return MediaItem("video", b"", MediaOptions(fps=fps, **options), frames=tuple(map(png, frames)))


def clip_pipeline(
    config: VideoProcessorConfig = CLIPS, limits: MediaLimits = LIMITS, cache_bytes: int = 8 << 20
) -> MediaPipeline:
    return MediaPipeline(CONFIG, limits, 2, cache_bytes, 1000, config)


def shown_frames(pipeline: MediaPipeline, item: MediaItem) -> Picture:
    """What the model is shown, put together again: uint8 [t, depth, height, width, 3]."""
    facts = pipeline.describe(item)
    pixels = pipeline.materialise(item, facts).result(60).patches.pixels
    t, h, w = facts.grid
    depth = pixels.shape[2]
    cut = pixels.reshape(t, h // 2, w // 2, 2, 2, 3, depth, 16, 16)
    whole: Picture = cut.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t, depth, h * 16, w * 16, 3)
    return whole
