"""Clips as a kind of media: files, and lists of pictures. What is shown is chosen once, in `describe`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from PIL import Image

from prism_server.errors import BadRequest
from prism_server.identity import Digest, layout_digest
from prism_server.media import containers, image, qwen, sampling
from prism_server.media.clip_plan import fit_clip
from prism_server.media.containers import ClipIndex
from prism_server.media.item import ClipFacts, IsWanted, ItemFacts, ItemKey, MediaItem, Patches, Unwanted
from prism_server.media.kinds import REMEMBERED_LAYOUTS, MediaKind
from prism_server.media.limits import MediaLimits
from prism_server.media.sampling import Frames, Sampling
from prism_server.media.video_config import VideoProcessorConfig


@dataclass(frozen=True, slots=True)
class _Shown:
    """Numbers of frames, and when each of them is on screen, in seconds."""

    frames: Frames
    times_s: npt.NDArray[np.float64]


class VideoKind(MediaKind):
    """Files are sampled at a rate; a list of pictures is shown whole as far as the number of frames allows."""

    name = "video"

    def __init__(self, config: VideoProcessorConfig, limits: MediaLimits, share_repeats: bool = False) -> None:
        """`share_repeats`: frames that repeat those before are encoded once. They show the same, so no key knows it."""
        self._config = config
        self._limits = limits
        self._share_repeats = share_repeats
        self._layout_of = lru_cache(maxsize=REMEMBERED_LAYOUTS)(self._compute_layout)

    def layout(self, item: MediaItem) -> Digest:
        if item.frames and item.options.fps is None:
            raise BadRequest("a list of frames needs their fps", item.param)
        pixels = self._config.pixels_for(item.options, item.param)
        counts = self._config.sampling_for(item.options, item.param)
        by_scenes = item.options.sampling == "scenes"
        return self._layout_of(pixels.min_pixels, pixels.max_pixels, counts, bool(item.frames), by_scenes)

    def describe(self, item: MediaItem, key: ItemKey) -> ItemFacts:
        return self._describe_list(item, key) if item.frames else self._describe_file(item, key)

    def prepare(self, item: MediaItem, facts: ItemFacts, is_wanted: IsWanted) -> Patches:
        if facts.clip is None:
            raise ValueError(f"the facts of a clip say nothing of its frames: {facts}")
        frames = facts.clip.frames
        pictures = self._listed(item, facts, frames, is_wanted) if item.frames else self._read(item, frames, is_wanted)
        return qwen.clip_patches(pictures, facts.grid, self._config, self._share_repeats)

    # -- lists of pictures -------------------------------------------------------------------------------------------

    def _describe_list(self, item: MediaItem, key: ItemKey) -> ItemFacts:
        total, fps = len(item.frames), item.options.fps
        assert fps is not None  # `layout` comes first
        self._limits.check_listed_frames(total, item.param)
        with _named(0, item.param):
            first = image.read_header(item.frames[0], self._limits, item.param)

        def show(count: int) -> _Shown:
            frames = sampling.even_frames(total, count)
            return _Shown(frames, frames / fps)

        counts = self._config.sampling_for(item.options, item.param)
        wanted = min(total, counts.max_frames)
        facts = self._facts(item, key, (first.width, first.height), wanted, counts, show)
        assert facts.clip is not None
        self._limits.check_decoding(len(facts.clip.frames), first.width, first.height, item.param)
        for number in facts.clip.frames[1:].tolist():
            with _named(number, item.param):
                header = image.read_header(item.frames[number], self._limits, item.param)
                if (header.width, header.height) != (first.width, first.height):
                    raise BadRequest(
                        f"it has {header.width} x {header.height} pixels, the first one {first.width} x {first.height}"
                    )
        return facts

    def _listed(self, item: MediaItem, facts: ItemFacts, frames: Frames, is_wanted: IsWanted) -> Iterator[Image.Image]:
        for number in frames.tolist():
            if not is_wanted():
                raise Unwanted
            with _named(number, item.param):
                picture = image.decode(item.frames[number], self._limits, item.param)
            if picture.size != (facts.width, facts.height):
                raise BadRequest("the bytes are not those that the facts were taken from", item.param)
            yield picture

    # -- files -------------------------------------------------------------------------------------------------------

    def _describe_file(self, item: MediaItem, key: ItemKey) -> ItemFacts:
        size = containers.frame_size(item.data, self._limits, item.param)
        index = containers.read_index(item.data, self._limits, item.param)
        counts = self._config.sampling_for(item.options, item.param)
        by_scenes = item.options.sampling == "scenes"
        wanted = sampling.num_sampled(index.num_frames, index.mean_fps, counts)
        facts = self._facts(item, key, size, wanted, counts, lambda count: _choose(index, count, by_scenes))
        assert facts.clip is not None
        self._limits.check_decoding(index.num_decoded(facts.clip.frames), *size, item.param)
        return facts

    def _read(self, item: MediaItem, frames: Frames, is_wanted: IsWanted) -> Iterator[Image.Image]:
        index = containers.read_index(item.data, self._limits, item.param)
        if frames[-1] >= index.num_frames:
            raise BadRequest("the bytes are not those that the facts were taken from", item.param)
        return containers.read_frames(item.data, index, frames, self._limits, item.param, is_wanted)

    # -- both --------------------------------------------------------------------------------------------------------

    def _facts(
        self,
        item: MediaItem,
        key: ItemKey,
        size: tuple[int, int],
        num_wanted: int,
        counts: Sampling,
        show: Callable[[int], _Shown],
    ) -> ItemFacts:
        """`size`: width and height in pixels; `show`: the frames to show, given how many."""
        config, (width, height) = self._config, size
        pixels = config.pixels_for(item.options, item.param)
        fit = fit_clip(num_wanted, counts.min_frames, height, width, config, pixels, item.param)
        shown = show(fit.num_frames)
        shown.frames.flags.writeable = False
        times_s = sampling.pair_times_s(shown.times_s, config.temporal_patch_size)
        runs, rows, columns = fit.grid
        num_tokens = runs * rows * columns // config.merge_size**2
        clip = ClipFacts(shown.frames, times_s, fit.lowered)
        return ItemFacts(key, self.name, fit.grid, num_tokens, width, height, clip)

    def _compute_layout(
        self, min_pixels: int, max_pixels: int, counts: Sampling, is_list: bool, by_scenes: bool
    ) -> Digest:
        return layout_digest(
            self.name,
            {
                "processor": self._config.fingerprint,
                "min_pixels": min_pixels,
                "max_pixels": max_pixels,
                "fps": repr(counts.fps),
                "min_frames": counts.min_frames,
                "max_frames": counts.max_frames,
                "source": "list" if is_list else "file",
                "sampling": "scenes" if by_scenes else "even",
                "resample": "bicubic",
                "background": "white",
            },
        )


@contextmanager
def _named(number: int, param: str) -> Iterator[None]:
    """A refusal inside says which frame of a list it is about."""
    try:
        yield
    except BadRequest as error:
        raise BadRequest(f"frame {number}: {error.reason}", f"{param}[{number}]", error.status, error.code) from error


def _choose(index: ClipIndex, count: int, by_scenes: bool) -> _Shown:
    """`count` of a file's frames. At an even rate a frame's time is its number over the rate, as for the reference.

    At a varying rate it is the frame on screen at each of as many moments, evenly spread, and that moment.
    """
    if by_scenes or count == index.num_frames:
        frames = sampling.scene_frames(index.packet_bytes, count)
    elif index.fps is None:
        moments_s = np.linspace(0.0, float(index.times_s[-1]), count)
        return _Shown(sampling.frames_at(index.times_s, moments_s), moments_s)
    else:
        frames = sampling.even_frames(index.num_frames, count)
    return _Shown(frames, index.times_s[frames] if index.fps is None else frames / index.fps)
