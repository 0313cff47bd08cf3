"""Which frames are shown, when, and how large: against the reference's functions, and within the server's limits."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from clip_samples import CLIPS, LIMITS
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

from prism_server.errors import BadRequest
from prism_server.identity import MediaOptions
from prism_server.media.clip_plan import clip_size, fit_clip
from prism_server.media.messages import split_messages
from prism_server.media.processor_config import PixelRange
from prism_server.media.sampling import (
    Sampling,
    even_frames,
    frames_at,
    num_sampled,
    pair_times_s,
    scene_frames,
)
from prism_server.media.video_config import VideoProcessorConfig

RELEASED = VideoProcessorConfig(16, 2, 2, PixelRange(4096, 25_165_824), Sampling(2.0, 4, 768), max_tokens=12_288)


def test_frames_and_times_equal_the_reference_for_many_clips() -> None:
    rng = random.Random(5)
    reference = Qwen3VLVideoProcessor()
    for _ in range(2000):
        total, source_fps = rng.randint(1, 3000), rng.choice([1, 2, 10, 23.976, 24, 25, 30000 / 1001, 30, 50, 59.94])
        least = rng.randint(1, 8)
        sampling = Sampling(rng.choice([0.25, 0.5, 1, 2.0, 3, 7.5]), least, rng.randint(least, 900))
        reference.min_frames, reference.max_frames = sampling.min_frames, sampling.max_frames
        expected = reference.sample_frames(VideoMetadata(total, fps=source_fps), fps=sampling.fps)
        frames = even_frames(total, num_sampled(total, source_fps, sampling))
        assert frames.tolist() == expected.tolist()
        times_s = pair_times_s(frames / source_fps, 2)
        assert times_s.tolist() == Qwen3VLProcessor._calculate_timestamps(None, expected, source_fps, 2)


def test_30_fps_sampled_at_2_fps_has_these_texts() -> None:
    frames = even_frames(150, num_sampled(150, 30, Sampling(2.0, 4, 768)))
    assert frames.tolist() == [0, 17, 33, 50, 66, 83, 99, 116, 132, 149]
    texts = [f"<{time_s:.1f} seconds>" for time_s in pair_times_s(frames / 30, 2)]
    assert texts == ["<0.3 seconds>", "<1.4 seconds>", "<2.5 seconds>", "<3.6 seconds>", "<4.7 seconds>"]


def test_sizes_equal_the_reference_for_many_clips() -> None:
    rng = random.Random(6)
    for _ in range(3000):
        count, height, width = rng.randint(2, 800), rng.randint(1, 2500), rng.randint(1, 2500)
        if max(height, width) > 150 * min(height, width):
            continue
        config = rng.choice([CLIPS, RELEASED])
        pixels = config.pixels
        expected = smart_resize(count, height, width, 2, 32, pixels.min_pixels, pixels.max_pixels)
        assert clip_size(count, height, width, config, pixels) == expected


@pytest.mark.parametrize("count", [4, 31, 300, 768])
def test_a_checkpoint_that_caps_its_frames_is_sized_as_the_reference_sizes_it(count: int) -> None:
    """Its rule is inside `resize`, which needs torchvision; the limit it hands on is computed here as there."""
    config = VideoProcessorConfig(16, 2, 2, RELEASED.pixels, RELEASED.sampling, 12_288, frame_tokens=768)
    frame_pixels = max(min(768 * 1024, RELEASED.pixels.max_pixels // count), int(4096 * 1.05))
    expected = smart_resize(count, 1080, 1920, 2, 32, 4096, frame_pixels * count)
    assert clip_size(count, 1080, 1920, config, config.pixels) == expected


def fit(count: int, height: int, width: int, max_tokens: int) -> tuple[int, int, int, bool]:
    """(frames, tokens, tokens of a pair, lowered)"""
    config = VideoProcessorConfig(16, 2, 2, RELEASED.pixels, RELEASED.sampling, max_tokens)
    made = fit_clip(count, 4, height, width, config, config.pixels, "messages")
    tokens = math.prod(made.grid) // 4
    assert made.grid[0] == -(-made.num_frames // 2)
    return made.num_frames, tokens, tokens // made.grid[0], made.lowered


def test_the_released_models_never_reach_the_default_budget() -> None:
    for count in (2, 20, 200, 768):
        frames, tokens, _, lowered = fit(count, 1080, 1920, 12_288)
        assert (frames, lowered) == (count, False)
        assert tokens <= 12_288


def test_a_clip_over_the_budget_loses_frames_first_and_size_only_then() -> None:
    frames, tokens, a_pair, lowered = fit(40, 320, 320, 1500)
    assert (frames, a_pair, lowered) == (30, 100, True)
    assert tokens <= 1500
    frames, tokens, a_pair, lowered = fit(40, 320, 320, 400)
    assert (frames, lowered) == (10, True)  # a quarter of the frames, and smaller ones
    assert a_pair < 100
    assert tokens <= 400


def test_no_clip_gets_more_tokens_than_the_budget() -> None:
    rng = random.Random(7)
    for _ in range(3000):
        count, height = rng.randint(1, 800), rng.randint(16, 2500)
        width = rng.randint(max(16, height // 4), 4 * height)
        budget = rng.choice([8, 20, 64, 300, 1000, 5000, 12_288])
        frames, tokens, _, _ = fit(count, height, width, budget)
        assert tokens <= budget
        assert 1 <= frames <= count


def test_what_is_on_screen_at_a_moment_is_shown_for_it() -> None:
    times_s = np.array([0.0, 1.0, 1.5, 20.0, 20.1])
    assert frames_at(times_s, np.array([0.0, 0.9, 1.0, 10.0, 19.9, 20.0, 20.1])).tolist() == [0, 0, 1, 2, 2, 3, 4]


def test_scenes_get_more_frames_where_the_file_has_more_bytes() -> None:
    quiet, busy = np.full(400, 50, dtype=np.int64), np.full(100, 1000, dtype=np.int64)
    frames = scene_frames(np.concatenate([quiet, busy, quiet]), 20)
    assert len(set(frames.tolist())) == 20
    assert frames[[0, -1]].tolist() == [0, 899]
    inside = ((frames >= 400) & (frames < 500)).sum()
    assert inside >= 6  # of a ninth of the time, which evenly spread frames would give two
    assert min((frames < 400).sum(), (frames >= 500).sum()) > 2


@pytest.mark.parametrize("count", [1, 2, 7, 30, 31])
def test_scene_frames_rise_and_stay_inside_whatever_the_bytes(count: int) -> None:
    rng = np.random.default_rng(count)
    for sizes in (np.zeros(31), np.ones(31), rng.integers(0, 10**6, 31), np.eye(1, 31, 30)[0] * 10**9):
        frames = scene_frames(sizes.astype(np.int64), count)
        assert len(frames) == count
        assert (np.diff(frames) > 0).all()
        assert frames[0] >= 0
        assert frames[-1] <= 30


def test_a_request_narrows_and_never_widens_the_numbers_of_frames() -> None:
    def counts(**said: float | int) -> Sampling:
        return CLIPS.sampling_for(MediaOptions(**said), "messages")  # type: ignore[arg-type]

    assert counts() == Sampling(2.0, 4, 12)
    assert counts(fps=0.5, max_frames=100) == Sampling(0.5, 4, 12)
    assert counts(max_frames=3) == Sampling(2.0, 3, 3)
    assert counts(min_frames=10) == Sampling(2.0, 10, 12)
    with pytest.raises(BadRequest, match="min_frames 13") as caught:
        counts(min_frames=13)
    assert caught.value.param == "messages.min_frames"


@pytest.mark.parametrize("fps", [0, -1, 1e-300, 5e-324, 1001, float("nan"), float("inf"), True, "2", 10**400])
def test_a_rate_that_gives_no_times_is_refused(fps: object) -> None:
    part = {"type": "video", "video": ["data:,x"], "fps": fps}
    with pytest.raises(BadRequest, match=r"fps must be a number of frames a second, from 0\.000001 to 1000") as caught:
        split_messages([{"role": "user", "content": [part]}], LIMITS)
    assert caught.value.param == "messages[0].content[0].fps"
    for good in (1e-6, 1000, 29.97):
        said = split_messages([{"role": "user", "content": [part | {"fps": good}]}], LIMITS)
        assert said.sources[0].options.fps == good


def test_a_frame_too_long_for_the_whole_budget_is_refused_with_both_numbers() -> None:
    with pytest.raises(BadRequest, match="needs 27 tokens even for its first frame; a clip may have 8") as caught:
        fit(10, 10, 1920, 8)
    assert caught.value.param == "messages"
