"""A checkpoint's clip processor, in both layouts of its files, and the limits on top."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clip_samples import CLIPS
from media_samples import CONFIG
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from prism_server.demo_model import checkpoint_dir
from prism_server.errors import StartupError
from prism_server.identity import content_id
from prism_server.media.facts_table import FactsTable
from prism_server.media.item import ClipFacts, ItemFacts, ItemKey
from prism_server.media.pipeline import MediaPipeline
from prism_server.media.processor_config import PixelRange
from prism_server.media.sampling import Sampling
from prism_server.media.video_config import VideoProcessorConfig, load_video_processor
from prism_server.settings import MediaSettings

RELEASED: dict[str, Any] = {
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "video_processor_type": "Qwen3VLVideoProcessor",
    "processor_class": "Qwen3VLProcessor",
}


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def load(directory: Path, max_tokens: int = 12_288) -> VideoProcessorConfig | None:
    return load_video_processor(directory, CONFIG, max_tokens)


def test_the_released_layout_is_read_and_the_reference_has_the_same_defaults(tmp_path: Path) -> None:
    write(tmp_path, "video_preprocessor_config.json", RELEASED)
    config = load(tmp_path)
    assert config is not None
    assert config.pixels == PixelRange(4096, 25165824)
    reference = Qwen3VLVideoProcessor()
    assert config.sampling == Sampling(reference.fps, reference.min_frames, reference.max_frames)
    assert config.frame_tokens is None
    write(tmp_path, "video_preprocessor_config.json", RELEASED | {"cap_pixels_per_frame": True})
    capped = load(tmp_path)
    assert capped is not None
    assert capped.frame_tokens == reference.max_video_tokens


def test_both_layouts_give_one_fingerprint_and_every_limit_another(tmp_path: Path) -> None:
    write(tmp_path, "video_preprocessor_config.json", RELEASED)
    plain = load(tmp_path)
    write(tmp_path, "processor_config.json", {"image_processor": {}, "video_processor": RELEASED})
    merged = load(tmp_path)
    assert plain is not None
    assert merged is not None
    others = [
        replace(plain, max_tokens=100),
        replace(plain, frame_tokens=5),
        replace(plain, sampling=Sampling(1.0, 4, 768)),
        replace(plain, pixels=PixelRange(4096, 10_000_000)),
    ]
    assert plain.fingerprint == merged.fingerprint
    assert len({config.fingerprint for config in (plain, *others)}) == 5


def test_the_demo_models_files_say_how_clips_are_shown_and_the_namespace_follows_them() -> None:
    pipelines = [
        MediaPipeline.from_settings(MediaSettings(workers=1, max_video_tokens=limit), checkpoint_dir())
        for limit in (12_288, 100)
    ]
    assert pipelines[0].video == CLIPS
    assert pipelines[0].fingerprint != pipelines[1].fingerprint
    for pipeline in pipelines:
        pipeline.close()


def test_a_checkpoint_without_the_file_has_no_clip_processor(tmp_path: Path) -> None:
    assert load(tmp_path) is None
    write(tmp_path, "processor_config.json", {"image_processor": {}})
    assert load(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "is not JSON"),
        ([1], "must hold a JSON object, not list"),
        ({k: v for k, v in RELEASED.items() if k != "merge_size"}, "'merge_size' is missing"),
        (RELEASED | {"video_processor_type": "LlavaVideoProcessor"}, "not Qwen3VLVideoProcessor"),
        (RELEASED | {"do_sample_frames": False}, "do_sample_frames must be true"),
        (RELEASED | {"num_frames": 8}, "num_frames"),
        (RELEASED | {"fps": "two"}, "fps must be a number"),
        (RELEASED | {"fps": 0}, "no number of frames"),
        (RELEASED | {"min_frames": 9, "max_frames": 8}, "no number of frames"),
        (RELEASED | {"size": {"shortest_edge": 9, "longest_edge": 8}}, "least area 9 is above"),
        (RELEASED | {"image_mean": [0.4, 0.5, 0.5]}, "normalised alike"),
        (RELEASED | {"patch_size": 14}, "cut into patches alike"),
    ],
)
def test_an_odd_file_is_one_line_at_start_up(tmp_path: Path, content: Any, reason: str) -> None:
    write(tmp_path, "video_preprocessor_config.json", content)
    with pytest.raises(StartupError, match=reason) as caught:
        load(tmp_path)
    assert "\n" not in caught.value.reason
    assert str(tmp_path) in caught.value.reason


def facts(number: int, num_frames: int = 0) -> ItemFacts:
    key = ItemKey(content_id("video", bytes([number])), bytes(32))
    if not num_frames:
        return ItemFacts(key, "image", (1, 2, 2), 1, 32, 32)
    clip = ClipFacts(np.arange(num_frames, dtype=np.int32), np.zeros(num_frames // 2))
    return ItemFacts(key, "video", (num_frames // 2, 2, 2), num_frames // 2, 32, 32, clip)


def test_a_clips_facts_take_the_room_of_as_many_pictures_as_its_list_of_frames_is_long() -> None:
    table = FactsTable(100)
    for number in range(40):
        table.put(facts(number))
    table.put(facts(100, num_frames=768))  # 49 shares
    assert table.stats().evictions == 0
    table.put(facts(101, num_frames=768))
    assert (table.stats().items_now, table.stats().evictions) == (4, 38)
    table.put(facts(101, num_frames=768))  # again: nothing is counted twice
    assert table.stats().items_now == 4
    alone = FactsTable(1)
    alone.put(facts(1, num_frames=768))
    assert alone.get(facts(1, num_frames=768).key) is not None


def test_times_that_do_not_fit_the_grid_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 times for a clip"):
        ItemFacts(facts(1).key, "video", (3, 2, 2), 3, 32, 32, ClipFacts(np.arange(4, dtype=np.int32), np.zeros(2)))
