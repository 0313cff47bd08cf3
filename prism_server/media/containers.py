"""Clips in files (MP4, MOV, MKV, WebM, GIF): what frames there are, and the pixels of the chosen ones. Uses PyAV.

PyAV is imported with the first clip: it takes 50 MB that a server of pictures does not need, and a router never.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from prism_server.errors import BadRequest, PrismError
from prism_server.media.limits import MediaLimits

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

MOV_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
MATROSKA_MAGIC = b"\x1aE\xdf\xa3"
GIF_MAGIC = (b"GIF87a", b"GIF89a")
FORMATS = "MP4, MOV, MKV, WebM, GIF"

MAX_INDEXED_FRAMES = 1_000_000
"""Of one file; twice what the longest clip has at 120 frames a second. Bounds the index where time does not move."""
READ_BYTES = 1 << 18
DECODING_THREADS = 4
"""Of one clip; several clips are decoded side by side."""
LEAST_SKIPPED_FRAMES = 16
"""A seek throws the decoder's state away and reads anew: worth it from so many frames on."""
JITTER_SHARE = 0.1
"""Of a frame's time: how far each frame may lie from an even rate that is then taken as exact (clocks are coarse)."""
MAX_STALE_SHARE = 0.25
"""Of the shown frames: so many may be missing and be replaced by those before them; more is not the clip."""

QUARTER_TURNS = {
    90: Image.Transpose.ROTATE_90,
    180: Image.Transpose.ROTATE_180,
    -180: Image.Transpose.ROTATE_180,
    -90: Image.Transpose.ROTATE_270,
}
"""What a display matrix's angle (degrees, counterclockwise) asks for. Other angles are not upright in any way."""


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
    with _opened(data, param) as (container, stream):
        limits.check_picture(stream.width, stream.height, param)  # as the header says, before anything is decoded
        first = next(_decoded(container, stream), None)
        if first is None:
            raise BadRequest("no frame of the clip can be decoded", param)
        limits.check_picture(first.width, first.height, param)
        sideways = abs(_rotation(first)) == 90
        return (first.height, first.width) if sideways else (first.width, first.height)


def read_index(data: bytes, limits: MediaLimits, param: str) -> ClipIndex:
    """The file's frames, counted by what is in it and not by what its header says. Raises BadRequest."""
    with _opened(data, param) as (container, stream):
        return _index(container, stream, limits, param)


def _index(container: InputContainer, stream: VideoStream, limits: MediaLimits, param: str) -> ClipIndex:
    tick_s = float(stream.time_base or 0)
    found: list[tuple[int, int, bool]] = []
    first_pts: int | None = None
    for packet in container.demux(stream):
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
    found.sort()
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


def read_frames(data: bytes, index: ClipIndex, frames: npt.NDArray[np.int32], param: str) -> Iterator[Image.Image]:
    """The upright RGB pictures of `frames` (never falling), one after the other. Raises BadRequest.

    A frame that cannot be decoded is replaced by the one before it; too many of them, and the clip is refused.
    """
    last: tuple[int, Image.Image] | None = None
    num_stale = 0
    with _reading(param):
        for wanted, (pts, frame) in zip(index.pts[frames].tolist(), _chosen(data, index, frames, param), strict=True):
            num_stale += pts != wanted
            if num_stale > max(1, MAX_STALE_SHARE * len(frames)):
                raise BadRequest(f"the clip is damaged: too few of its {index.num_frames} frames can be decoded", param)
            if last is None or last[0] != pts:
                last = pts, _upright(frame)
            yield last[1]


def _chosen(
    data: bytes, index: ClipIndex, frames: npt.NDArray[np.int32], param: str
) -> Iterator[tuple[int, VideoFrame]]:
    """For each wanted frame its time and itself, or the latest decoded one before it."""
    with _opened(data, param) as (container, stream):
        running, position = _timed(container, stream), 0
        latest: tuple[int, VideoFrame] | None = None
        ahead: tuple[int, VideoFrame] | None = None
        for start, frame in index.stretches(frames):
            if start != position and _can_seek(container, stream, int(index.pts[start])):
                running = _timed(container, stream)
                latest, ahead = None, next(running, None)
                if ahead is None or ahead[0] > index.pts[start]:  # it went too far: all over again, without seeking
                    container.seek(int(index.pts[0]), stream=stream)
                    running, ahead = _timed(container, stream), None
            wanted = int(index.pts[frame])
            while latest is None or latest[0] < wanted:
                ahead = ahead or next(running, None)
                if ahead is None or (latest is not None and ahead[0] > wanted):
                    break
                latest, ahead = ahead, None
            if latest is None:
                raise BadRequest("no frame of the clip can be decoded", param)
            yield latest
            position = frame + 1


def _can_seek(container: InputContainer, stream: VideoStream, pts: int) -> bool:
    """Goes to the key frame at `pts`. False where the file has no way to: decoding goes on from where it is."""
    from av.error import FFmpegError

    try:
        container.seek(pts, stream=stream)
    except (FFmpegError, OSError):
        return False
    return True


def _timed(container: InputContainer, stream: VideoStream) -> Iterator[tuple[int, VideoFrame]]:
    for frame in _decoded(container, stream):
        pts = frame.pts if frame.pts is not None else frame.dts
        if pts is not None:
            yield pts, frame


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Frames from where the container stands, to its end. What is damaged is passed over."""
    from av.error import FFmpegError

    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except (FFmpegError, OSError):
            continue


def _upright(frame: VideoFrame) -> Image.Image:
    """8-bit RGB, turned by the display matrix, transparency flattened on white."""
    if any(component.is_alpha for component in frame.format.components):
        rgba = Image.fromarray(frame.to_ndarray(format="rgba"))
        picture = Image.new("RGB", rgba.size, "white")
        picture.paste(rgba, mask=rgba.getchannel("A"))
    else:
        picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turn = QUARTER_TURNS.get(_rotation(frame))
    return picture if turn is None else picture.transpose(turn)


def _rotation(frame: VideoFrame) -> int:
    return round(frame.rotation)


@contextmanager
def _opened(data: bytes, param: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The file and its first video stream. The format is named: formats that make FFmpeg open other files are out."""
    name = _format(data)
    if name is None:
        raise BadRequest(f"the medium is not a clip of a known format ({FORMATS})", param)
    try:
        import av
    except ModuleNotFoundError as error:
        reason = "clips in files are not served here (PyAV is not installed); send a list of frames"
        raise BadRequest(reason, param, code="unsupported_part") from error
    file = io.BytesIO(data)
    with (
        _reading(param),
        av.open(file, "r", format=name, buffer_size=READ_BYTES, metadata_errors="replace") as container,
    ):
        if not container.streams.video:
            raise BadRequest("the file has no video stream", param)
        stream = container.streams.video[0]
        if getattr(stream, "codec_context", None) is None:
            raise BadRequest("the codec of the clip is not known", param)
        stream.codec_context.thread_count = DECODING_THREADS
        stream.thread_type = "AUTO"
        yield container, stream


def _format(data: bytes) -> str | None:
    """FFmpeg's name of the format that the first bytes say."""
    if data[4:8] in MOV_BOXES:
        return "mov"
    if data.startswith(MATROSKA_MAGIC):
        return "matroska"
    return "gif" if data.startswith(GIF_MAGIC) else None


@contextmanager
def _reading(param: str) -> Iterator[None]:
    """Turns whatever FFmpeg raises into a refusal of this item. Broad on purpose, as for pictures. PyAV is there."""
    from av.error import FFmpegError

    try:
        yield
    except PrismError:
        raise
    except Exception as error:
        reason = str(error)
        if isinstance(error, FFmpegError):
            reason = error.strerror or ""
        elif isinstance(error, MemoryError):
            raise  # the host's own; FFmpeg's is what a damaged file asks for
        raise BadRequest(f"the clip cannot be decoded: {reason or type(error).__name__}", param) from error
