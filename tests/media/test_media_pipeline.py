"""Describe and materialise: identity, reuse, refusals, bounded memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from media_samples import CONFIG, LIMITS, encode, exif_orientation, item, make_pipeline, noise, peak_growth_bytes, plain

from prism_server.errors import BadRequest, EngineFault, StartupError
from prism_server.identity import MediaOptions, content_id
from prism_server.media.data_url import data_url_bytes
from prism_server.media.item import ItemFacts, MediaItem
from prism_server.media.messages import split_messages
from prism_server.media.pipeline import MediaPipeline
from prism_server.settings import MediaSettings

WAIT_S = 60


@pytest.fixture
def pipeline() -> Iterator[MediaPipeline]:
    made = make_pipeline()
    yield made
    made.close()


def show(pipeline: MediaPipeline, shown: MediaItem) -> np.ndarray:
    return pipeline.materialise(shown, pipeline.describe(shown)).result(WAIT_S).patches.pixels


def test_a_red_and_a_blue_picture_of_one_size_differ_and_the_red_one_is_known_again(pipeline: MediaPipeline) -> None:
    red, blue = item(encode(plain("red"))), item(encode(plain("blue")))
    first, other, again = (pipeline.describe(shown) for shown in (red, blue, red))
    assert first.grid == other.grid
    assert first.key.content_id != other.key.content_id
    assert again is first
    decoded = [
        pipeline.materialise(i, f).result(WAIT_S).decoded for i, f in ((red, first), (blue, other), (red, again))
    ]
    assert decoded == [True, True, False]
    assert (show(pipeline, red)[:, 0] == 255).all()
    assert (show(pipeline, blue)[:, 2] == 255).all()


def test_black_pictures_of_30x150_and_150x30_have_other_keys_and_grids(pipeline: MediaPipeline) -> None:
    tall, wide = (pipeline.describe(item(encode(plain("black", *size)))) for size in ((30, 150), (150, 30)))
    assert tall.key.content_id != wide.key.content_id
    assert tall.grid == (1, *reversed(wide.grid[1:]))
    assert tall.grid != wide.grid


def test_two_palette_pictures_with_equal_indices_and_other_palettes_have_other_keys_and_pixels(
    pipeline: MediaPipeline,
) -> None:
    shown = []
    for palette in ([255, 0, 0], [0, 0, 255]):
        picture = plain(0, mode="P")
        picture.putpalette(palette)
        shown.append(item(encode(picture)))
    assert pipeline.describe(shown[0]).key != pipeline.describe(shown[1]).key
    assert not np.array_equal(show(pipeline, shown[0]), show(pipeline, shown[1]))


def test_the_same_bytes_under_two_pixel_limits_have_another_grid_and_another_key(pipeline: MediaPipeline) -> None:
    data = encode(noise(200, 200))
    small, large = item(data, options=MediaOptions(max_pixels=8000)), item(data)
    facts = pipeline.describe(small), pipeline.describe(large)
    assert facts[0].key.content_id == facts[1].key.content_id
    assert facts[0].key.layout != facts[1].key.layout
    assert facts[0].num_tokens < facts[1].num_tokens
    assert len(show(pipeline, small)) == facts[0].num_patches < len(show(pipeline, large)) == facts[1].num_patches


def test_options_that_say_what_holds_anyway_share_the_layout(pipeline: MediaPipeline) -> None:
    data = encode(plain("red"))
    said = item(data, options=MediaOptions(min_pixels=1, max_pixels=CONFIG.pixels.max_pixels))
    assert pipeline.describe(said).key == pipeline.describe(item(data)).key


@pytest.mark.parametrize("name", ["id", "uuid", "file_id", "cache_key"])
def test_a_client_id_with_two_different_pictures_changes_nothing_content_wins(
    pipeline: MediaPipeline, name: str
) -> None:
    def described(colour: str, client_id: str) -> ItemFacts:
        url = "data:;base64," + b64encode(encode(plain(colour))).decode()
        part = {"type": "image_url", "image_url": {"url": url, name: client_id}, name: client_id}
        (source,) = split_messages([{"role": "user", "content": [part]}], LIMITS).sources
        data = data_url_bytes(source.url, LIMITS, source.param)
        return pipeline.describe(MediaItem(source.kind, data, source.options, source.param))

    red, blue, renamed = described("red", "mine"), described("blue", "mine"), described("red", "another")
    assert red.key != blue.key
    assert red.key == renamed.key


def test_another_normalisation_is_another_layout(pipeline: MediaPipeline) -> None:
    other = make_pipeline(replace(CONFIG, mean=(0.4, 0.5, 0.5)))
    shown = item(encode(plain("red")))
    assert other.describe(shown).key.layout != pipeline.describe(shown).key.layout
    other.close()


def test_the_key_covers_the_encoded_bytes_and_the_grid_follows_the_orientation(pipeline: MediaPipeline) -> None:
    picture = noise(128, 64)
    upright, turned = (item(encode(picture, "JPEG", exif=exif_orientation(value))) for value in (1, 6))
    facts = pipeline.describe(upright), pipeline.describe(turned)
    assert facts[0].key.content_id == content_id("image", upright.data) != facts[1].key.content_id
    assert (facts[0].width, facts[0].height, facts[0].grid) == (128, 64, (1, 4, 8))
    assert (facts[1].width, facts[1].height, facts[1].grid) == (64, 128, (1, 8, 4))
    assert facts[0].num_tokens == facts[1].num_tokens == 8


@pytest.mark.parametrize(("width", "height"), [(1, 1), (27, 300), (31, 32), (1, 200)])
def test_tiny_and_thin_pictures_are_scaled_up_and_served(pipeline: MediaPipeline, width: int, height: int) -> None:
    shown = item(encode(noise(width, height)))
    facts = pipeline.describe(shown)
    assert facts.num_tokens * 1024 >= CONFIG.pixels.min_pixels
    assert show(pipeline, shown).shape == (facts.num_patches, 3, 1, 16, 16)


def test_describe_decodes_nothing_and_a_known_item_is_not_even_opened(pipeline: MediaPipeline) -> None:
    data = encode(noise(300, 200), "JPEG")
    half = item(data[: len(data) // 2])
    assert pipeline.describe(half) is pipeline.describe(half)
    stats = pipeline.stats()
    assert (stats.decoded_items, stats.facts.hits, stats.facts.misses) == (0, 1, 1)


def test_half_a_jpeg_is_described_and_fails_alone_when_materialised(pipeline: MediaPipeline) -> None:
    data = encode(noise(300, 200), "JPEG")
    half, whole = item(data[: len(data) // 2], param="messages[3]"), item(data)
    futures = [pipeline.materialise(shown, pipeline.describe(shown)) for shown in (half, whole)]
    with pytest.raises(BadRequest, match="cannot be decoded") as caught:
        futures[0].result(WAIT_S)
    assert caught.value.param == "messages[3]"
    assert futures[1].result(WAIT_S).decoded
    again = pipeline.materialise(half, pipeline.describe(half))
    with pytest.raises(BadRequest):
        again.result(WAIT_S)
    assert (pipeline.stats().cache.failed, pipeline.stats().decoded_items) == (2, 1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (item(b""), "empty"),
        (item(b"no picture"), "not a picture"),
        (item(bytes(LIMITS.max_item_bytes + 1)), "more than 1048576 bytes"),
        (item(encode(plain("red", 1, 201))), "200 times"),
        (item(encode(plain("red")), options=MediaOptions(max_pixels=0)), "at least 1"),
        (MediaItem("smell", b"?"), "kind 'smell'"),
    ],
)
def test_a_bad_item_is_a_400_with_param_and_reason_and_is_not_remembered(
    pipeline: MediaPipeline, bad: MediaItem, reason: str
) -> None:
    for _ in range(2):
        with pytest.raises(BadRequest, match=reason) as caught:
            pipeline.describe(replace(bad, param="messages[2]"))
        assert (caught.value.param or "").startswith("messages[2]")
    assert pipeline.stats().facts.items_now == 0
    assert pipeline.describe(item(encode(plain("red")))).num_tokens == 4


def test_too_many_media_are_refused_with_both_numbers() -> None:
    LIMITS.check_count(64, "messages")
    with pytest.raises(BadRequest, match=r"65 media .* at most 64"):
        LIMITS.check_count(65, "messages")


def test_concurrent_requests_for_one_item_prepare_it_once_through_the_pipeline(pipeline: MediaPipeline) -> None:
    shown, barrier = item(encode(noise(400, 300))), threading.Barrier(16)

    def ask(_: int) -> bool:
        barrier.wait(WAIT_S)
        return pipeline.materialise(shown, pipeline.describe(shown)).result(WAIT_S).decoded

    with ThreadPoolExecutor(16) as clients:
        assert sorted(clients.map(ask, range(16))) == [False] * 15 + [True]
    assert pipeline.stats().decoded_items == 1


def test_one_picture_twice_in_one_prompt_is_prepared_once(pipeline: MediaPipeline) -> None:
    shown = item(encode(noise(100, 80)))
    results = [pipeline.materialise(shown, pipeline.describe(shown)) for _ in range(2)]
    assert [future.result(WAIT_S).decoded for future in results] == [True, False]


def test_facts_outlive_patches() -> None:
    pipeline = make_pipeline(cache_bytes=0)
    shown = item(encode(plain("red")))
    facts = pipeline.describe(shown)
    assert pipeline.materialise(shown, facts).result(WAIT_S).decoded
    assert pipeline.describe(shown) is facts
    assert pipeline.materialise(shown, facts).result(WAIT_S).decoded
    pipeline.close()


def test_two_thousand_different_pictures_leave_memory_flat() -> None:
    pipeline = make_pipeline(cache_bytes=256 << 10, facts_items=100)

    def serve(first: int, count: int) -> None:
        for number in range(first, first + count):
            show(pipeline, item(encode(plain((number & 255, number >> 8, 9)))))

    serve(0, 200)
    grown = peak_growth_bytes(lambda: serve(200, 1800))
    stats = pipeline.stats()
    pipeline.close()
    assert grown < 8 << 20, "1,800 times 12 KiB of patches would be 21 MiB"
    assert stats.decoded_items == 2000
    assert stats.cache.bytes_now <= 256 << 10
    assert stats.cache.items_now + stats.cache.evictions == 2000
    assert stats.facts.items_now == 100


def test_a_closed_pipeline_fails_what_is_asked_later() -> None:
    pipeline = make_pipeline()
    shown = item(encode(plain("red")))
    facts = pipeline.describe(shown)
    pipeline.close()
    with pytest.raises(EngineFault):
        pipeline.materialise(shown, facts)


def test_facts_of_other_bytes_are_refused(pipeline: MediaPipeline) -> None:
    facts: ItemFacts = pipeline.describe(item(encode(plain("red", 64, 64))))
    with pytest.raises(BadRequest, match="not those"):
        pipeline.materialise(item(encode(plain("red", 64, 96))), facts).result(WAIT_S)


def test_a_pipeline_is_made_from_settings_and_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        MediaPipeline.from_settings(MediaSettings(), tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(
        '{"size": {"shortest_edge": 4096, "longest_edge": 147456}, "patch_size": 16, "temporal_patch_size": 2,'
        ' "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}'
    )
    pipeline = MediaPipeline.from_settings(MediaSettings(max_image_tokens=100, max_item_bytes=5000), tmp_path)
    assert pipeline.config.pixels.max_pixels == 102400
    assert pipeline.limits.max_item_bytes == 5000
    pipeline.close()


def test_media_never_import_torch() -> None:
    code = "import sys, prism_server.media.pipeline, prism_server.media.data_url; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize("threshold", [0, 1 << 30])
def test_the_items_of_a_request_are_described_together_as_alone_and_the_first_fault_counts(
    pipeline: MediaPipeline, monkeypatch: pytest.MonkeyPatch, threshold: int
) -> None:
    """Hashed side by side, or one after the other."""
    monkeypatch.setattr("prism_server.media.pipeline.LEAST_PARALLEL_BYTES", threshold)
    items = [item(encode(noise(96, 96, seed))) for seed in range(6)]
    assert pipeline.describe_all(items) == [pipeline.describe(shown) for shown in items]
    assert pipeline.describe_all([]) == []
    broken = [replace(item(data), param=f"part {i}") for i, data in enumerate((b"no picture", b"", b"neither"))]
    for faulty, param in ((items + broken[:1] + items, "part 0"), (items[:1] + broken[1:], "part 1")):
        with pytest.raises(BadRequest) as refused:
            pipeline.describe_all(faulty)
        assert refused.value.param == param
