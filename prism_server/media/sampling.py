"""Which frames of a clip are shown. One choice of numbers, for the pixels and for the times in the prompt alike.

Written against `Qwen3VLVideoProcessor.sample_frames` of transformers 5.17, whose numbers equal `even_frames` of
`num_sampled`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EVEN_SHARE = 0.5
"""Of the weight that decides where scene-aware samples lie: spread evenly in time, so that still parts are seen too."""
LARGEST_IN_MEDIANS = 8.0
"""A packet counts at most as so many usual ones: a key frame is large whether or not the picture has changed."""

Frames = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How many frames of a clip to show: `fps` a second, at least and at most so many."""

    fps: float
    min_frames: int
    max_frames: int

    def __post_init__(self) -> None:
        if not (self.fps > 0 and 1 <= self.min_frames <= self.max_frames):
            raise ValueError(f"no number of frames is allowed by {self}")


def num_sampled(total: int, source_fps: float, sampling: Sampling) -> int:
    """How many of `total` frames, `source_fps` a second, are shown. Never more than there are."""
    wanted = int(total / source_fps * sampling.fps)
    return min(max(wanted, sampling.min_frames), sampling.max_frames, total)


def even_frames(total: int, count: int) -> Frames:
    """Numbers of `count` of `total` frames, evenly spread from the first to the last; int32 [count]."""
    frames: Frames = np.linspace(0, total - 1, count).round().astype(np.int32)
    return frames


def frames_at(times_s: npt.NDArray[np.float64], moments_s: npt.NDArray[np.float64]) -> Frames:
    """The frame that is on screen at each moment; `times_s` ascending, the first one at or before every moment."""
    return (np.searchsorted(times_s, moments_s, side="right") - 1).astype(np.int32)


def scene_frames(packet_bytes: npt.NDArray[np.int64], count: int) -> Frames:
    """Numbers of `count` frames, more of them where the picture changes more; int32 [count], strictly rising.

    What changes is read off the file: an encoder spends its bytes on change. Nothing is decoded. `count` is at most the
    number of packets.
    """
    total = len(packet_bytes)
    sizes = np.minimum(packet_bytes, LARGEST_IN_MEDIANS * max(1.0, float(np.median(packet_bytes))))
    weights = EVEN_SHARE / total + (1 - EVEN_SHARE) * sizes / max(1.0, float(sizes.sum()))
    passed = np.cumsum(weights)
    frames = np.searchsorted(passed, np.linspace(passed[0], passed[-1], count))
    order = np.arange(count)
    frames = np.maximum.accumulate(np.minimum(frames, total - 1) - order) + order  # no frame twice ...
    return np.minimum(frames, total - count + order).astype(np.int32)  # ... and none beyond the last


def pair_times_s(times_s: npt.NDArray[np.float64], depth: int) -> npt.NDArray[np.float64]:
    """The middle of each run of `depth` frames, in seconds: float64 [t], read-only. The last frame fills the last run.

    As `Qwen3VLProcessor._calculate_timestamps`.
    """
    padded = np.concatenate([times_s, np.repeat(times_s[-1:], -len(times_s) % depth)])
    middles: npt.NDArray[np.float64] = (padded[::depth] + padded[depth - 1 :: depth]) / 2
    middles.flags.writeable = False
    return middles
