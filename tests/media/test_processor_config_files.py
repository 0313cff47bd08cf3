"""Both layouts and both key styles of a checkpoint's processor files, and the limits on top."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from media_samples import CONFIG
from transformers import Qwen2VLImageProcessorPil

from prism_server.errors import BadRequest, StartupError
from prism_server.identity import MediaOptions
from prism_server.media.processor_config import PixelRange, load_image_processor

RELEASED: dict[str, Any] = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
}
MANY_TOKENS = 1 << 20


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_released_layout_is_read(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", RELEASED)
    config = load_image_processor(tmp_path, MANY_TOKENS)
    assert config.pixels == PixelRange(65536, 16777216)
    assert (config.patch_size, config.temporal_patch_size, config.merge_size, config.factor) == (16, 2, 2, 32)
    assert (config.mean, config.std) == ((0.5,) * 3, (0.5,) * 3)


def test_both_layouts_and_both_key_styles_give_one_fingerprint(tmp_path: Path) -> None:
    older = {key: value for key, value in RELEASED.items() if key != "size"}
    older |= {"min_pixels": 65536, "max_pixels": 16777216}
    in_size = RELEASED | {"size": {"min_pixels": 65536, "max_pixels": 16777216}}
    files = [
        ("preprocessor_config.json", RELEASED),
        ("preprocessor_config.json", older),
        ("preprocessor_config.json", in_size),
        ("processor_config.json", {"image_processor": RELEASED, "video_processor": {}}),
    ]
    fingerprints = set()
    for index, (name, content) in enumerate(files):
        directory = tmp_path / str(index)
        directory.mkdir()
        write(directory, name, content)
        fingerprints.add(load_image_processor(directory, MANY_TOKENS).fingerprint)
    assert len(fingerprints) == 1


def test_what_the_reference_saves_is_read(tmp_path: Path) -> None:
    Qwen2VLImageProcessorPil(**{k: v for k, v in RELEASED.items() if k != "processor_class"}).save_pretrained(tmp_path)
    assert load_image_processor(tmp_path, MANY_TOKENS).pixels == PixelRange(65536, 16777216)


def test_the_merged_file_wins_and_an_older_one_without_pictures_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", RELEASED)
    write(tmp_path, "processor_config.json", {"processor_class": "Qwen3VLProcessor"})
    assert load_image_processor(tmp_path, MANY_TOKENS).patch_size == 16
    write(tmp_path, "processor_config.json", {"image_processor": RELEASED | {"patch_size": 14}})
    assert load_image_processor(tmp_path, MANY_TOKENS).patch_size == 14


def test_the_smaller_of_the_processors_and_the_servers_limit_applies(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", RELEASED)
    assert load_image_processor(tmp_path, 4096).pixels.max_pixels == 4096 * 1024
    assert load_image_processor(tmp_path, 16385).pixels.max_pixels == 16777216
    assert load_image_processor(tmp_path, 4096).fingerprint != load_image_processor(tmp_path, 4097).fingerprint


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no picture processor"),
        ("{", "is not JSON"),
        ([1], "must hold a JSON object, not list"),
        ({k: v for k, v in RELEASED.items() if k != "patch_size"}, "'patch_size' is missing"),
        (RELEASED | {"merge_size": 0}, "merge_size must be a positive integer"),
        (RELEASED | {"size": {"height": 224, "width": 224}}, "shortest_edge"),
        (RELEASED | {"size": {"shortest_edge": 9, "longest_edge": 8}}, "least area 9 is above"),
        (RELEASED | {"image_mean": [0.5]}, "image_mean must be a list of 3"),
        (RELEASED | {"image_std": [0, 1, 1]}, "image_std must not hold a zero"),
        (RELEASED | {"image_processor_type": "CLIPImageProcessor"}, "not of the Qwen-VL family"),
        (RELEASED | {"do_normalize": False}, "do_normalize must be true"),
        (RELEASED | {"resample": 2}, "resample must be 3"),
    ],
)
def test_a_missing_or_odd_file_is_one_line_at_start_up(tmp_path: Path, content: Any, reason: str) -> None:
    if content is not None:
        write(tmp_path, "preprocessor_config.json", content)
    with pytest.raises(StartupError, match=reason) as caught:
        load_image_processor(tmp_path, MANY_TOKENS)
    assert "\n" not in caught.value.reason
    assert str(tmp_path) in caught.value.reason


def test_a_token_limit_below_the_models_least_picture_is_an_error_at_start_up(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", RELEASED)
    with pytest.raises(StartupError, match="max_image_tokens 63"):
        load_image_processor(tmp_path, 63)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (MediaOptions(), PixelRange(4096, 147456)),
        (MediaOptions(max_pixels=10000), PixelRange(4096, 10000)),
        (MediaOptions(min_pixels=10000), PixelRange(10000, 147456)),
        (MediaOptions(min_pixels=1, max_pixels=10**9), PixelRange(4096, 147456)),
    ],
)
def test_a_request_can_narrow_the_pixel_range_and_not_widen_it(options: MediaOptions, expected: PixelRange) -> None:
    assert CONFIG.pixels_for(options, "p") == expected


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (MediaOptions(min_pixels=0), "min_pixels"),
        (MediaOptions(max_pixels=-5), "max_pixels"),
        (MediaOptions(min_pixels=9000, max_pixels=8000), "max_pixels"),
        (MediaOptions(max_pixels=4095), "max_pixels"),
        (MediaOptions(min_pixels=147457), "min_pixels"),
    ],
)
def test_pixel_options_that_leave_nothing_are_refused(options: MediaOptions, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        CONFIG.pixels_for(options, "messages[1]")
    assert caught.value.param == f"messages[1].{field}"


def test_every_field_is_in_the_fingerprint() -> None:
    others = [
        replace(CONFIG, patch_size=14),
        replace(CONFIG, temporal_patch_size=1),
        replace(CONFIG, merge_size=1),
        replace(CONFIG, pixels=PixelRange(4097, 147456)),
        replace(CONFIG, pixels=PixelRange(4096, 147457)),
        replace(CONFIG, mean=(0.5, 0.5, 0.4)),
        replace(CONFIG, std=(0.5, 0.4, 0.5)),
        replace(CONFIG, rescale_factor=1 / 256),
    ]
    assert len({config.fingerprint for config in [CONFIG, *others]}) == len(others) + 1


@pytest.mark.parametrize(("least", "most", "reason"), [(0, 5, "at least 1"), (9, 8, "least area 9 is above")])
def test_a_range_of_pixels_that_holds_no_size_cannot_be_made(least: int, most: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        PixelRange(least, most)
