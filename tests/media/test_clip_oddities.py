"""Clips that are sound but unusual: covers, mirrors, edits, missing tables, keys that are none, frames that grow."""

from __future__ import annotations

import gc
import io
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest
from clip_making import LEVEL, Picture, clip_file, lossless, number_of, numbered, speckled
from clip_samples import CLIPS, LIMITS, clip, clip_pipeline, frame_list, shown_frames
from media_samples import encode, noise, peak_growth_bytes
from PIL import Image

from prism_server.errors import BadRequest
from prism_server.media.clip_file import ClipFile
from prism_server.media.containers import frame_size, read_frames, read_index
from prism_server.media.limits import MediaLimits
from prism_server.media.pipeline import MediaPipeline
from prism_server.media.sampling import Sampling


@pytest.fixture
def pipeline() -> Iterator[MediaPipeline]:
    made = clip_pipeline()
    yield made
    made.close()


def numbers_of(data: bytes, wanted: Sequence[int], limits: MediaLimits = LIMITS) -> list[int]:
    """Which numbered frames are shown for the `wanted` ones."""
    index = read_index(data, limits, "messages")
    shown = read_frames(data, index, np.array(wanted, dtype=np.int32), limits, "messages")
    return [number_of(np.asarray(picture).mean()) for picture in shown]


LATE = [5000 + 100 * i for i in range(12)]
EARLY = [100 * i - 500 for i in range(12)]
ODD: dict[str, tuple[Callable[[], bytes], int, list[float]]] = {
    "33 x 17": (lambda: clip_file(numbered(10, 33, 17), 10, "webm", "libvpx-vp9"), 10, [0.15, 0.75]),
    "1000 frames a second": (lambda: lossless(numbered(30), 1000), 30, [0.005, 0.024]),
    "one frame": (lambda: clip_file(numbered(1), 10), 1, [0.0]),
    "one frame of a gif": (lambda: clip_file(numbered(1), 10, "gif", "gif", "rgb8"), 1, [0.0]),
    "a late start": (lambda: clip_file(numbered(12), 10, times=LATE), 12, [0.2, 0.9]),
    "a start below zero": (lambda: lossless(numbered(12), 10, times=EARLY), 12, [0.2, 0.9]),
    "an edit that leaves out the beginning": (lambda: clip_file(numbered(12), 10, times=EARLY), 7, [0.1, 0.5]),
    "open groups": (
        lambda: clip_file(
            speckled(24, 96, 64), 10, "mp4", "libx265", options={"x265-params": "log-level=none:keyint=8:open-gop=1"}
        ),
        24,
        [0.4, 1.9],
    ),
    "frames that only help to decode others": (
        lambda: clip_file(speckled(40, 96, 64), 10, "webm", "libvpx", options={"auto-alt-ref": "1", "b": "50k"}),
        40,
        [0.3, 1.4, 2.5, 3.6],
    ),
    "frames in order of decoding": (
        lambda: clip_file(numbered(30), 10, container_options={"movflags": "negative_cts_offsets"}),
        30,
        [0.3, 1.45, 2.6],
    ),
    "fragments": (
        lambda: clip_file(
            numbered(30), 10, options={"g": "10"}, container_options={"movflags": "frag_keyframe+empty_moov"}
        ),
        30,
        [0.3, 1.45, 2.6],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_clip_has_its_frames_and_their_times(pipeline: MediaPipeline, name: str) -> None:
    make, count, times_s = ODD[name]
    data = make()
    assert read_index(data, LIMITS, "messages").num_frames == count
    facts = pipeline.describe(clip(data))
    assert facts.clip is not None
    assert facts.clip.pair_times_s.tolist() == pytest.approx(times_s, abs=0.002)
    assert pipeline.materialise(clip(data), facts).result(60).decoded


MATRICES = {
    (1, 0, 0, 1): None,
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,  # a quarter clockwise: how phones are mostly held
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
    (0, 0, 0, 0): None,
}


@pytest.mark.parametrize("matrix", MATRICES)
def test_a_mirrored_clip_is_shown_as_it_is_to_be_seen(matrix: tuple[int, int, int, int]) -> None:
    picture = np.zeros((64, 96, 3), dtype=np.uint8)
    picture[:32, :48] = (255, 0, 0)
    picture[:32, 48:] = (0, 255, 0)
    picture[32:, :48] = (0, 0, 255)
    data = bytearray(clip_file([picture] * 2, 2, "mov", "qtrle", "rgb24"))
    at = data.index(b"tkhd") + 44  # ISO/IEC 14496-12, 8.3.2: behind version, times, id, duration, layer, volume
    assert struct.unpack(">9i", data[at : at + 36]) == (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    a, b, c, d = (number << 16 for number in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    expected = Image.fromarray(picture)
    turn = MATRICES[matrix]
    expected = expected if turn is None else expected.transpose(turn)
    index = read_index(bytes(data), LIMITS, "messages")
    (shown,) = read_frames(bytes(data), index, np.array([1], dtype=np.int32), LIMITS, "messages")
    np.testing.assert_array_equal(np.asarray(shown), np.asarray(expected))
    assert frame_size(bytes(data), LIMITS, "messages") == expected.size


def with_cover(has_pictures: bool) -> bytes:
    """An MP4 with a cover of 200 x 200, beside pictures or sound. The cover stands before the track."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        cover = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 200, 200, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        packets: list[av.Packet] = []
        if has_pictures:
            pictures = container.add_stream("libx264", rate=10)
            pictures.width, pictures.height, pictures.pix_fmt = 96, 64, "yuv420p"
            for i, pixels in enumerate(numbered(10)):
                frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts, frame.time_base = i, Fraction(1, 10)
                packets += pictures.encode(frame)
            packets += pictures.encode()
        else:
            sound = container.add_stream("aac", rate=16_000, layout="mono")
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), "fltp", "mono")
            silence.sample_rate, silence.pts = 16_000, 0
            packets += [*sound.encode(silence), *sound.encode()]
        container.mux(packets)
        packet = av.Packet(encode(noise(200, 200), "JPEG"))
        packet.stream, packet.pts, packet.dts, packet.time_base = cover, 0, 0, Fraction(1, 90_000)
        container.mux(packet)
    data = out.getvalue()
    moov, at = data.index(b"moov") + 4, data.index(b"udta") - 4
    num_bytes = int.from_bytes(data[at : at + 4], "big")
    first = moov + int.from_bytes(data[moov : moov + 4], "big")  # behind the movie's own header
    return data[:first] + data[at : at + num_bytes] + data[first:at] + data[at + num_bytes :]


def test_a_cover_is_not_the_clip(pipeline: MediaPipeline) -> None:
    data = with_cover(has_pictures=True)
    with av.open(io.BytesIO(data)) as container:
        assert container.streams.video[0].disposition == av.stream.Disposition.attached_pic
    facts = pipeline.describe(clip(data))
    assert (facts.width, facts.height) == (96, 64)
    assert numbers_of(data, [0, 4, 9]) == [0, 4, 9]
    with pytest.raises(BadRequest, match="no video stream"):
        pipeline.describe(clip(with_cover(has_pictures=False)))


def test_an_animation_that_is_no_container_of_clips_is_a_400(pipeline: MediaPipeline) -> None:
    out = io.BytesIO()
    pictures = [Image.fromarray(pixels) for pixels in numbered(3)]
    pictures[0].save(out, "WEBP", save_all=True, append_images=pictures[1:])
    with pytest.raises(BadRequest, match="known format"):
        pipeline.describe(clip(out.getvalue()))


@pytest.mark.parametrize("disposal", [0, 1, 2, 3])
def test_a_gif_is_put_together_as_its_disposal_says(pipeline: MediaPipeline, disposal: int) -> None:
    """Of frame i the bar i is painted; what stood before stays, goes, or comes back."""
    pictures = []
    for i in range(4):
        picture = Image.new("RGBA", (96, 64), (0, 0, 0, 0))
        picture.paste((255, 0, 0, 255), (24 * i, 0, 24 * i + 24, 64))
        pictures.append(picture)
    out = io.BytesIO()
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=500, disposal=disposal)
    whole = shown_frames(pipeline, clip(out.getvalue()))
    last = whole[-1, -1, 32, 12::24]
    assert last[3].tolist() == [255, 0, 0]
    for bar in last[:3].tolist():
        assert bar == ([255, 0, 0] if disposal in (0, 1) else [255, 255, 255])


def many(count: int, fmt: str = "matroska", key_every: int = 20, **more: str) -> bytes:
    frames: list[Picture] = [np.full((16, 16, 3), i % 32 * LEVEL, dtype=np.uint8) for i in range(count)]
    return clip_file(frames, 25, fmt, options={"g": str(key_every), "sc_threshold": "0", **more})


WANTED = [0, 5, 100, 101, 250, 259, 260, 599]
RIGHT = [number % 32 for number in WANTED]


def test_a_matroska_file_without_cues_is_found_through() -> None:
    data = many(600)
    at = data.rindex(b"\x1c\x53\xbb\x6b")  # Cues, after the clusters
    numbers = numbers_of(data[:at], WANTED)
    assert read_index(data[:at], LIMITS, "messages").num_frames == 600
    assert numbers == RIGHT


def test_a_seek_that_goes_too_far_is_the_last_and_costs_one_more_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file's own table says is not always where its frames are."""
    data, seek = many(600), ClipFile.try_seek
    sought: list[int] = []

    def too_far(file: ClipFile, pts: int) -> bool:
        sought.append(pts)
        return seek(file, pts + 2000)

    monkeypatch.setattr(ClipFile, "try_seek", too_far)
    assert read_index(data, LIMITS, "messages").num_decoded(np.array(WANTED, dtype=np.int32)) < 100
    assert numbers_of(data, WANTED) == RIGHT
    assert len(sought) > 1
    whole = MediaLimits(64, 16 << 20, 100_000_000, max_video_decoded_pixels=16 * 16 * 600)
    assert numbers_of(data, WANTED, whole) == RIGHT
    few = MediaLimits(64, 16 << 20, 100_000_000, max_video_decoded_pixels=16 * 16 * 200)
    with pytest.raises(BadRequest, match="decodes at most 51200"):
        numbers_of(data, WANTED, few)


@pytest.mark.parametrize("fmt", ["mp4", "matroska", "webm", "gif"])
def test_one_corrupt_packet_in_the_middle_costs_no_more_than_its_frame(pipeline: MediaPipeline, fmt: str) -> None:
    codec, pix_fmt = {"mp4": ("libx264", "yuv420p"), "gif": ("gif", "rgb8"), "webm": ("libvpx", "yuv420p")}.get(
        fmt, ("ffv1", "bgr0")
    )
    options = {} if fmt == "gif" else {"g": "1"}
    good = clip_file(speckled(12, 96, 64), 2, fmt, codec, pix_fmt, options=options)
    with av.open(io.BytesIO(good)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    at = good.index(packets[5]) if fmt != "gif" else good.index(packets[5][:200])
    bad = bytearray(good)
    for i in range(at + 24, at + min(200, len(packets[5]))):
        bad[i] ^= 0x55
    whole, expected = (shown_frames(pipeline, clip(data)) for data in (bytes(bad), good))
    np.testing.assert_array_equal(whole[:2], expected[:2])
    if fmt != "gif":  # where each frame is painted over the one before
        np.testing.assert_array_equal(whole[3:], expected[3:])


def grown(size: int) -> bytes:
    """96 x 64 in the header and in the first frame, then `size` x `size`: packets of another file under this header."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=2)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuvj420p"
        for number, side in enumerate(((96, 64), (96, 64), (size, size), (size, size))):
            packet = av.Packet(encode(Image.new("RGB", side, (16, 16, 16)), "JPEG"))
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 2), True
            packet.pts = packet.dts = number
            container.mux(packet)
    return out.getvalue()


def test_a_frame_that_is_larger_than_the_header_says_is_held_to_the_limits() -> None:
    assert numbers_of(grown(128), [0, 1, 2, 3], LIMITS) == [2, 2, 2, 2]
    narrow = MediaLimits(64, 16 << 20, max_decoded_pixels=96 * 64)
    with pytest.raises(BadRequest, match="at most 6144"):
        numbers_of(grown(100), [0, 1, 2, 3], narrow)
    with pytest.raises(BadRequest, match="too few of its 4 frames can be decoded"):  # the decoder makes no room for it
        numbers_of(grown(2000), [0, 1, 2, 3], narrow)


def test_a_header_of_enormous_frames_is_refused_with_the_numbers_before_any_is_decoded(
    pipeline: MediaPipeline,
) -> None:
    data = clip_file(speckled(1, 640, 480), 2)
    limits = MediaLimits(64, 16 << 20, max_decoded_pixels=10_000)
    with pytest.raises(BadRequest, match="640 x 480 has 307200 pixels; this server decodes at most 10000"):
        frame_size(data, limits, "messages")
    gif = bytearray(clip_file(numbered(2), 2, "gif", "gif", "rgb8"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    with pytest.raises(BadRequest):
        pipeline.describe(clip(bytes(gif)))


def test_a_clip_without_a_duration_is_a_400(pipeline: MediaPipeline) -> None:
    """Two frames at one time: which of them is on screen, and when?"""
    still = lossless(numbered(2), times=[0, 100])
    at = still.rindex(b"\xa3")  # the second SimpleBlock: its size, the track, and two bytes of time in the cluster
    number = still.index(b"\x81\x00\x64", at)
    data = still[: number + 1] + b"\0\0" + still[number + 3 :]
    with pytest.raises(BadRequest, match="all frames of the clip have the same time"):
        pipeline.describe(clip(data))


@pytest.mark.parametrize("form", ["a file", "a list"])
def test_frames_are_scaled_one_after_the_other(form: str) -> None:
    """All of them as they are stored would take 160 MB."""
    frames: list[Picture] = [np.full((1200, 1200, 3), 8 * i, dtype=np.uint8) for i in range(28)]
    item = clip(clip_file(frames, 2, "mp4", "mpeg4")) if form == "a file" else frame_list(frames)
    config = replace(CLIPS, sampling=Sampling(2.0, 4, 28))
    pipeline = clip_pipeline(config, cache_bytes=0)
    facts = pipeline.describe(item)
    assert facts.clip is not None
    assert len(facts.clip.frames) == 28
    assert peak_growth_bytes(lambda: pipeline.materialise(item, facts).result(60)) < 64 << 20
    pipeline.close()


def test_no_frame_waits_for_the_garbage_to_be_collected(pipeline: MediaPipeline) -> None:
    """A server collects rarely, and frames are large."""

    def num_frames() -> int:
        return sum(type(known) is av.VideoFrame for known in gc.get_objects())

    data = clip_file(numbered(12), 2, rotation=90)
    gc.collect()  # what other tests have left
    was_enabled = gc.isenabled()
    gc.disable()
    before = num_frames()
    try:
        facts = pipeline.describe(clip(data))
        pipeline.materialise(clip(data), facts).result(60)
        assert num_frames() == before
    finally:
        if was_enabled:
            gc.enable()


def test_frames_that_lie_hours_apart_are_too_long_in_any_order() -> None:
    """Times that fall: a later cluster of a Matroska file may say an earlier time."""
    hours = lossless(numbered(2), times=[7_200_000, 7_200_100])
    start = lossless(numbered(2), times=[0, 100])
    cluster = b"\x1f\x43\xb6\x75"
    data = hours[: hours.rindex(b"\x1c\x53\xbb\x6b")] + start[start.index(cluster) : start.rindex(b"\x1c\x53\xbb\x6b")]
    with pytest.raises(BadRequest, match="longer than 3600 seconds"):
        read_index(data, LIMITS, "messages")
