"""How a checkpoint wants its clips: rate, number and size of frames; read from either layout of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prism_server.errors import BadRequest, StartupError
from prism_server.identity import MediaOptions, framed_digest
from prism_server.media.processor_config import (
    MERGED_FILE,
    ImageProcessorConfig,
    PixelRange,
    area,
    channels,
    check_transforms,
    integer,
    narrowed,
    read_section,
)
from prism_server.media.sampling import Sampling

PLAIN_FILE = "video_preprocessor_config.json"
MERGED_KEY = "video_processor"

DEFAULT_FPS, DEFAULT_MIN_FRAMES, DEFAULT_MAX_FRAMES, DEFAULT_FRAME_TOKENS = 2.0, 4, 768, 768
"""Of `Qwen3VLVideoProcessor` (transformers 5.17), for what a file leaves out."""


@dataclass(frozen=True)
class VideoProcessorConfig:
    """The clip half of a checkpoint's processor, with the server's own limit beside it."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    pixels: PixelRange
    """Area in pixels, after resizing, summed over the frames that are shown."""
    sampling: Sampling
    max_tokens: int
    """The server's limit of one clip, in placeholder tokens."""
    frame_tokens: int | None = None
    """Tokens of one frame's area at most, where the checkpoint caps its frames (`cap_pixels_per_frame`)."""

    def __post_init__(self) -> None:
        if min(self.patch_size, self.temporal_patch_size, self.merge_size) < 1:
            raise ValueError("patch_size, temporal_patch_size and merge_size must be at least 1")
        if min(self.max_tokens, self.frame_tokens or 1) < 1:
            raise ValueError("a clip needs room for at least one token")

    @property
    def factor(self) -> int:
        """Both sides of a resized frame are multiples of it, in pixels."""
        return self.patch_size * self.merge_size

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits over every field: caches made under another fingerprint show other frames."""
        return framed_digest("video-processor", (json.dumps(asdict(self), sort_keys=True),)).hex()

    def pixels_for(self, options: MediaOptions, param: str) -> PixelRange:
        """The range narrowed by what a request says; BadRequest where the two leave nothing."""
        return narrowed(self.pixels, options, param)

    def sampling_for(self, options: MediaOptions, param: str) -> Sampling:
        """The rate that a request asks for, and its number of frames within the checkpoint's. Raises BadRequest."""
        most = min(self.sampling.max_frames, options.max_frames or self.sampling.max_frames)
        asked = options.min_frames
        if asked is not None and asked > most:
            raise BadRequest(f"min_frames {asked} is above the {most} frames that may be shown", f"{param}.min_frames")
        least = min(self.sampling.min_frames, most) if asked is None else asked
        return Sampling(options.fps or self.sampling.fps, least, most)


def load_video_processor(
    directory: Path, pictures: ImageProcessorConfig, max_video_tokens: int
) -> VideoProcessorConfig | None:
    """Reads the clip processor of the checkpoint in `directory`; None where it has none, and shows no clips.

    Raises StartupError, one line, for a file of another family, or one whose pixels are not normalised as those of
    `pictures`: the vision tower has one table for both.
    """
    found = read_section(directory, ((MERGED_FILE, MERGED_KEY), (PLAIN_FILE, None)))
    if found is None:
        return None
    path, raw = found
    try:
        return _parse(raw, pictures, max_video_tokens)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise StartupError(f"{path}: {reason}") from error


def _parse(raw: Mapping[str, Any], pictures: ImageProcessorConfig, max_video_tokens: int) -> VideoProcessorConfig:
    family = raw.get("video_processor_type", "Qwen3VLVideoProcessor")
    if family != "Qwen3VLVideoProcessor":
        raise ValueError(f"video_processor_type {family!r} is not Qwen3VLVideoProcessor")
    check_transforms(raw, ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_sample_frames"))
    if raw.get("num_frames") is not None:
        raise ValueError("a fixed num_frames is not supported; min_frames and max_frames are")
    mean, std = channels(raw, "image_mean"), channels(raw, "image_std")
    if (mean, std, float(raw.get("rescale_factor", 1 / 255))) != (
        pictures.mean,
        pictures.std,
        pictures.rescale_factor,
    ):
        raise ValueError("clips and pictures must be normalised alike (image_mean, image_std, rescale_factor)")
    config = VideoProcessorConfig(
        patch_size=integer(raw, "patch_size"),
        temporal_patch_size=integer(raw, "temporal_patch_size"),
        merge_size=integer(raw, "merge_size"),
        pixels=PixelRange(area(raw, "shortest_edge", "min_pixels"), area(raw, "longest_edge", "max_pixels")),
        sampling=Sampling(
            float(_given(raw, "fps", DEFAULT_FPS)),
            _given(raw, "min_frames", DEFAULT_MIN_FRAMES),
            _given(raw, "max_frames", DEFAULT_MAX_FRAMES),
        ),
        max_tokens=max_video_tokens,
        frame_tokens=_given(raw, "max_video_tokens", DEFAULT_FRAME_TOKENS) if raw.get("cap_pixels_per_frame") else None,
    )
    if (config.patch_size, config.temporal_patch_size, config.merge_size) != (
        pictures.patch_size,
        pictures.temporal_patch_size,
        pictures.merge_size,
    ):
        raise ValueError("clips and pictures must be cut into patches alike")
    return config


def _given(raw: Mapping[str, Any], key: str, default: Any) -> Any:
    value = raw.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{key} must be a number, not {value!r}")
    return value
