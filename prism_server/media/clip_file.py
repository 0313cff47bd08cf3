"""A clip's file while it is read: its packets, and its frames from the start or from a key frame. Uses PyAV.

PyAV is imported with the first clip: it takes 50 MB that a server of pictures does not need, and a router never.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism_server.errors import BadRequest, PrismError
from prism_server.media.item import IsWanted, Unwanted
from prism_server.media.limits import MediaLimits
from prism_server.media.mp4_header import checked_metadata, is_mirrored

if TYPE_CHECKING:
    from av import Packet, VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream

MOV_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")
MATROSKA_MAGIC = b"\x1aE\xdf\xa3"
GIF_MAGIC = (b"GIF87a", b"GIF89a")
FORMATS = "MP4, MOV, MKV, WebM, GIF"

CODECS = (
    *("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4", "msmpeg4", "mpeg1video", "mpeg2video", "h263"),
    *("vc1", "wmv3", "theora", "prores", "dnxhd", "ffv1", "mjpeg", "gif", "png", "qtrle", "rawvideo", "v210"),
)
"""By FFmpeg's names. It decodes three hundred kinds of pictures, most of them of games and recorders long gone: nobody
asks a model about those, and untrusted bytes must not reach them. Of sound nothing is decoded at all."""

READ_BYTES = 1 << 18
DECODING_THREADS = 4
"""Of one clip; several clips are decoded side by side."""
DECODER_SLACK = 2
"""Times the limits that were checked before: a decoder makes room for whole blocks, and seeks may lead nowhere."""
LEAST_DECODER_PIXELS = 1 << 20
"""That a decoder is allowed to make room for: small frames have wide margins."""


def always_wanted() -> bool:
    return True


@dataclass(slots=True)
class ClipFile:
    """An open file and its first video stream that is no cover picture. One thread's."""

    container: InputContainer
    stream: VideoStream
    is_mirrored: bool
    limits: MediaLimits
    param: str
    is_wanted: IsWanted
    num_decoded: int = 0
    seeks_well: bool = True
    """Until a seek has led elsewhere than to the key frame that it was for."""

    def packets(self) -> Iterator[Packet[VideoStream]]:
        """From where the file stands. Raises Unwanted, and whatever FFmpeg does."""
        for packet in self.container.demux(self.stream):
            if not self.is_wanted():
                raise Unwanted
            yield packet

    def frames(self) -> Iterator[tuple[int, VideoFrame]]:
        """Decoded frames and their times, in the stream's time base, to the file's end. Damage is passed over.

        BadRequest where that is far more work than the limits allow: frames grow, or seeks lead nowhere.
        """
        from av.error import FFmpegError

        most = DECODER_SLACK * self.limits.max_video_decoded_pixels
        for packet in self.packets():
            try:
                decoded = packet.decode()
            except (FFmpegError, OSError):
                continue
            for frame in decoded:
                self.num_decoded += 1
                if self.num_decoded * frame.width * frame.height > most:
                    self.limits.check_decoding(self.num_decoded, frame.width, frame.height, self.param)
                pts = frame.pts if frame.pts is not None else frame.dts
                if pts is not None:
                    yield pts, frame

    def try_seek(self, pts: int) -> bool:
        """Goes to the key frame at `pts`. False where the file has no way to: reading goes on from where it is."""
        from av.error import FFmpegError

        try:
            if self.seeks_well:
                self.container.seek(pts, stream=self.stream)
        except (FFmpegError, OSError):
            return False
        return self.seeks_well

    def rewind(self, first_pts: int) -> None:
        """To the start, after a seek that went too far; there are no others then."""
        self.seeks_well = False
        self.container.seek(first_pts, stream=self.stream)


@contextmanager
def opened(data: bytes, limits: MediaLimits, param: str, is_wanted: IsWanted = always_wanted) -> Iterator[ClipFile]:
    """Whatever goes wrong inside is a BadRequest. The format is named: those that open other files are out."""
    name = _format(data)
    if name is None:
        raise BadRequest(f"the medium is not a clip of a known format ({FORMATS})", param)
    mirrored = name == "mov" and is_mirrored(checked_metadata(data, param))
    try:
        import av
    except ModuleNotFoundError as error:
        reason = "clips in files are not served here (PyAV is not installed); send a list of frames"
        raise BadRequest(reason, param, code="unsupported_part") from error
    most_pixels = max(DECODER_SLACK * limits.max_decoded_pixels, LEAST_DECODER_PIXELS)
    bounds = {"max_pixels": str(most_pixels), "codec_whitelist": ",".join(CODECS)}
    file = io.BytesIO(data)
    with (
        _reading(param),
        av.open(file, "r", format=name, options=bounds, buffer_size=READ_BYTES, metadata_errors="replace") as container,
    ):
        stream = _moving(container)
        if stream is None:
            raise BadRequest("the file has no video stream", param)
        codec = getattr(stream, "codec_context", None)
        if codec is None or codec.name not in CODECS:
            name = codec.name if codec else "one that FFmpeg does not know"
            raise BadRequest(f"clips of this codec are not served: {name}; known: {', '.join(CODECS)}", param)
        stream.codec_context.options = bounds
        stream.codec_context.thread_count = DECODING_THREADS
        stream.thread_type = "AUTO"
        yield ClipFile(container, stream, mirrored, limits, param, is_wanted)


def _moving(container: InputContainer) -> VideoStream | None:
    """The first video stream; a cover picture is one for FFmpeg, but not for anybody who watches."""
    from av.stream import Disposition

    return next((it for it in container.streams.video if not it.disposition & Disposition.attached_pic), None)


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
    except (PrismError, Unwanted):
        raise
    except Exception as error:
        reason = str(error)
        if isinstance(error, FFmpegError):
            reason = error.strerror or ""
        elif isinstance(error, MemoryError):
            raise  # the host's own; FFmpeg's is what a damaged file asks for
        raise BadRequest(f"the clip cannot be decoded: {reason or type(error).__name__}", param) from error
