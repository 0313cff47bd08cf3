"""Clips in files (MP4, MOV, MKV, WebM, GIF): what frames there are, and the pixels of the chosen ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from prism_server.errors import BadRequest
from prism_server.media.clip_file import ClipFile, always_wanted, opened
from prism_server.media.display import upright, upright_size
from prism_server.media.item import IsWanted
from prism_server.media.limits import MediaLimits

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.stream import VideoStream

MAX_INDEXED_FRAMES = 1_000_000
"""Of one file; twice what the longest clip has at 120 frames a second. Bounds the index where time does not move."""
LEAST_SKIPPED_FRAMES = 16
"""A seek throws the decoder's state away and reads anew: worth it from so many frames on."""
JITTER_SHARE = 0.1
"""Of a frame's time: how far each frame may lie from an even rate that is then taken as exact (clocks are coarse)."""
MAX_STALE_SHARE = 0.25
"""Of the shown frames: so many may be missing and be replaced by those before them; more is not the clip."""


@dataclass(frozen=True, slots=True)
class ClipIndex:
    """The frames that a file has, in order of presentation. Nothing is decoded for it."""

    pts: npt.NDArray[np.int64] = field(repr=False)
    """In the stream's time base, ascending."""
    times_s: npt.NDArray[np.float64] = field(repr=False)
    """Since the first frame."""
    packet_bytes: npt.NDArray[np.int64] = field(repr=False)
    key_frames: npt.NDArray[np.int64] = field(repr=False)
    """Numbers of the frames that decoding can start at; the first frame always counts."""
    fps: float | None
    """Frames a second; None where they come at a varying rate."""

    @property
    def num_frames(self) -> int:
        return len(self.pts)

    @property
    def mean_fps(self) -> float:
        return self.fps or (self.num_frames - 1) / float(self.times_s[-1])

    def num_decoded(self, frames: npt.NDArray[np.int32]) -> int:
        """Frames that the decoder goes through to get at `frames` (never falling)."""
        return sum(frame - start + 1 for start, frame in self.stretches(frames))

    def stretches(self, frames: npt.NDArray[np.int32]) -> list[tuple[int, int]]:
        """(frame that decoding goes on from, frame wanted): seeking to a key frame where that skips enough."""
        after = self.key_frames[np.searchsorted(self.key_frames, frames, side="right") - 1]
        stretches, position = list[tuple[int, int]](), 0
        for frame, key in zip(frames.tolist(), after.tolist(), strict=True):
            start = key if key - position >= LEAST_SKIPPED_FRAMES else position
            stretches.append((start, frame))
            position = frame + 1
        return stretches


def frame_size(data: bytes, limits: MediaLimits, param: str) -> tuple[int, int]:
    """Width and height of the upright frame, in pixels, from the first one that decodes. Raises BadRequest."""
    with opened(data, limits, param) as file:
        stated = file.stream.width, file.stream.height
        if all(stated):
            limits.check_picture(*stated, param)  # as the header says, before anything is decoded
        _, first = next(file.frames(), (0, None))
        if first is None:
            raise BadRequest("no frame of the clip can be decoded", param)
        limits.check_picture(first.width, first.height, param)
        return upright_size(first)


def read_index(data: bytes, limits: MediaLimits, param: str) -> ClipIndex:
    """The file's frames, counted by what is in it and not by what its header says. Raises BadRequest."""
    with opened(data, limits, param) as file:
        tick_s = float(file.stream.time_base or 0)
        found: list[tuple[int, int, bool]] = []
        first_pts: int | None = None
        for packet in file.packets():
            pts = packet.pts if packet.pts is not None else packet.dts
            if pts is None or not packet.size or packet.is_discard:
                continue
            first_pts = pts if first_pts is None else min(first_pts, pts)
            limits.check_duration((pts - first_pts) * tick_s, param)
            found.append((pts, packet.size, packet.is_keyframe))
            if len(found) > MAX_INDEXED_FRAMES:
                raise BadRequest(f"the clip has more than {MAX_INDEXED_FRAMES} frames", param)
        if not found or tick_s <= 0:
            raise BadRequest("the clip has no frame with a time", param)
        index = _index_of(sorted(found), file.stream, tick_s, param)
        limits.check_duration(float(index.times_s[-1]), param)  # frames may come in any order
        return index


def _index_of(found: list[tuple[int, int, bool]], stream: VideoStream, tick_s: float, param: str) -> ClipIndex:
    """`found`: time, bytes and whether decoding can start there, of every frame, by time."""
    pts_of = np.array([pts for pts, _, _ in found], dtype=np.int64)
    times_s = (pts_of - pts_of[0]) * tick_s
    if len(found) > 1 and not times_s[-1]:
        raise BadRequest("all frames of the clip have the same time", param)
    keys = [number for number, (_, _, is_key) in enumerate(found) if is_key or not number]
    return ClipIndex(
        pts=pts_of,
        times_s=times_s,
        packet_bytes=np.array([num_bytes for _, num_bytes, _ in found], dtype=np.int64),
        key_frames=np.array(keys, dtype=np.int64),
        fps=_even_rate(times_s, stream, tick_s),
    )


def _even_rate(times_s: npt.NDArray[np.float64], stream: VideoStream, tick_s: float) -> float | None:
    """The rate that all frames keep, if there is one: the file's own word first, then what their times say."""
    stated = float(stream.average_rate) if stream.average_rate else 0.0
    if len(times_s) == 1:
        return stated if stated > 0 else 1.0
    measured = (len(times_s) - 1) / float(times_s[-1]) if times_s[-1] > 0 else 0.0
    for fps in (stated, measured):
        if fps > 0:
            off_s = np.abs(times_s - np.arange(len(times_s)) / fps).max()
            if off_s <= max(tick_s, JITTER_SHARE / fps):
                return fps
    return None


def read_frames(
    data: bytes,
    index: ClipIndex,
    frames: npt.NDArray[np.int32],
    limits: MediaLimits,
    param: str,
    is_wanted: IsWanted = always_wanted,
) -> Iterator[Image.Image]:
    """The upright RGB pictures of `frames` (never falling), one after the other. Raises BadRequest, and Unwanted.

    A frame that cannot be decoded is replaced by the one before it; too many of them, and the clip is refused.
    """
    last: tuple[int, Image.Image] | None = None
    num_stale = 0
    with opened(data, limits, param, is_wanted) as file:
        chosen = _chosen(file, index, frames)
        for wanted, (pts, frame) in zip(index.pts[frames].tolist(), chosen, strict=True):
            num_stale += pts != wanted
            if num_stale > max(1, MAX_STALE_SHARE * len(frames)):
                raise BadRequest(f"the clip is damaged: too few of its {index.num_frames} frames can be decoded", param)
            if last is None or last[0] != pts:
                limits.check_picture(frame.width, frame.height, param)  # it may change within a clip
                last = None  # two of them are too many where they are large
                last = pts, upright(frame, file.is_mirrored)
            yield last[1]


def _chosen(file: ClipFile, index: ClipIndex, frames: npt.NDArray[np.int32]) -> Iterator[tuple[int, VideoFrame]]:
    """For each wanted frame its time and itself, or the latest decoded one before it."""
    running, position = file.frames(), 0
    latest: tuple[int, VideoFrame] | None = None
    ahead: tuple[int, VideoFrame] | None = None
    for start, frame in index.stretches(frames):
        if start != position and file.try_seek(int(index.pts[start])):
            running = file.frames()
            latest, ahead = None, next(running, None)
            if ahead is None or ahead[0] > index.pts[start]:
                file.rewind(int(index.pts[0]))
                running, ahead = file.frames(), None
        wanted = int(index.pts[frame])
        while latest is None or latest[0] < wanted:
            ahead = ahead or next(running, None)
            if ahead is None or (latest is not None and ahead[0] > wanted):
                break
            latest, ahead = ahead, None
        if latest is None:
            raise BadRequest("no frame of the clip can be decoded", file.param)
        yield latest
        position = frame + 1
