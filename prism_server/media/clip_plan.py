"""How large a clip's frames are shown, and how many of them a clip's tokens allow.

The size is that of `smart_resize` in `video_processing_qwen3_vl.py` of transformers 5.17. Where it asks for more tokens
than the server gives a clip, the frame rate is lowered first, and the frames are made smaller only then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prism_server.errors import BadRequest
from prism_server.media.processor_config import PixelRange
from prism_server.media.video_config import VideoProcessorConfig

LEAST_FRAMES_SHARE = 4
"""The frame rate is lowered to a quarter at most; what is still missing then comes from the size of the frames."""

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Fit:
    """`num_frames` of a clip, shown in `grid` patches (time, rows, columns). `lowered`: fewer or smaller than asked."""

    num_frames: int
    grid: Grid
    lowered: bool


def clip_size(
    num_frames: int, height: int, width: int, config: VideoProcessorConfig, pixels: PixelRange
) -> tuple[int, int]:
    """Height and width, in pixels, at which `num_frames` frames (at least as many as a patch is deep) are shown.

    Multiples of `config.factor`. `pixels` bounds the area of all frames together.
    """
    factor, depth = config.factor, config.temporal_patch_size
    most = pixels.max_pixels
    if config.frame_tokens is not None:
        frame_pixels = min(config.frame_tokens * factor**2, most // num_frames)
        most = max(frame_pixels, int(pixels.min_pixels * 1.05)) * num_frames
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    shown_height, shown_width = round(height / factor) * factor, round(width / factor) * factor
    counted = round(num_frames / depth) * depth
    if counted * shown_height * shown_width > most:
        shrink = math.sqrt(num_frames * height * width / most)
        shown_height = max(factor, math.floor(height / shrink / factor) * factor)
        shown_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted * shown_height * shown_width < pixels.min_pixels:
        grow = math.sqrt(pixels.min_pixels / (num_frames * height * width))
        shown_height = math.ceil(height * grow / factor) * factor
        shown_width = math.ceil(width * grow / factor) * factor
    return shown_height, shown_width


def fit_clip(
    num_frames: int,
    min_frames: int,
    height: int,
    width: int,
    config: VideoProcessorConfig,
    pixels: PixelRange,
    param: str,
) -> Fit:
    """The frames and the size at which a clip of `num_frames` wanted frames is shown, within `config.max_tokens`.

    `min_frames`: what lowering the rate leaves at least. BadRequest where a single run of frames is too much.
    """
    depth, budget = config.temporal_patch_size, config.max_tokens

    def size(count: int, within: PixelRange) -> tuple[int, int]:
        return clip_size(max(count, depth), height, width, config, within)

    shown = size(num_frames, pixels)
    if _num_tokens(num_frames, shown, config) <= budget:
        return Fit(num_frames, _grid(num_frames, shown, config), lowered=False)
    fewest = max(depth, min_frames, -(-num_frames // LEAST_FRAMES_SHARE))
    count = min(num_frames, max(fewest, _most_frames(shown, config)))
    if _num_tokens(count, shown, config) > budget:
        most = budget * config.factor**2 * depth
        smaller = PixelRange(min(pixels.min_pixels, most), min(pixels.max_pixels, most))
        shown = size(count, smaller)
        count = min(count, _most_frames(shown, config))
    if count < 1 or _num_tokens(count, shown, config) > budget:
        raise BadRequest(
            f"the clip needs {_num_tokens(1, shown, config)} tokens even for its first frame; a clip may have {budget}",
            param,
        )
    return Fit(count, _grid(count, shown, config), lowered=True)


def _most_frames(shown: tuple[int, int], config: VideoProcessorConfig) -> int:
    """Frames of a size that the clip's tokens allow."""
    return config.temporal_patch_size * (config.max_tokens // _num_tokens(1, shown, config))


def _num_tokens(num_frames: int, shown: tuple[int, int], config: VideoProcessorConfig) -> int:
    return -(-num_frames // config.temporal_patch_size) * shown[0] * shown[1] // config.factor**2


def _grid(num_frames: int, shown: tuple[int, int], config: VideoProcessorConfig) -> Grid:
    patch = config.patch_size
    return -(-num_frames // config.temporal_patch_size), shown[0] // patch, shown[1] // patch
