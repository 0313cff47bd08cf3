"""The vision tower against Hugging Face transformers, each level on its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import DEMO_CHECKPOINT, demo_model, pixel_values, random_pixels, tiny_model
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from prism_server.model import Features, Qwen3VL, VisionState, vision
from prism_server.model.vision import pixel_table_of
from prism_server.model.vision_grid import FrameTable, patch_positions, resample_table
from prism_server.ops import make_ops

Pair = tuple[Qwen3VLForConditionalGeneration, Qwen3VL]
GRIDS = [(1, 4, 6), (1, 2, 2), (2, 6, 4), (1, 18, 12), (3, 2, 8)]
BOUND = 1e-4
"""Of features whose values are about one: float32 sums in another order."""


@pytest.fixture(scope="module", params=["2b", "8b", "demo"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if request.param == "demo":
        reference, directory = demo_model(), DEMO_CHECKPOINT
    else:
        reference, directory = tiny_model(request.param), tmp_path_factory.mktemp(request.param)
        reference.save_pretrained(directory)
    return reference, Qwen3VL.load(directory, "cpu", torch.float32, make_ops("torch", "cpu"))


def pixels_of(grid: tuple[int, int, int]) -> Tensor:
    """Two different frames a patch where there is time, one where it is a picture."""
    return random_pixels(grid, 2 if grid[0] > 1 else 1, seed=sum(grid))


def encode_all(model: Qwen3VL, grids: list[tuple[int, int, int]], blocks: int) -> list[Features]:
    states = [model.vision.begin(pixels_of(grid), grid) for grid in grids]
    while not states[0].done:
        model.vision.advance(states, blocks)
    return [model.vision.finish(state) for state in states]


def levels(features: Features) -> list[Tensor]:
    return [features.main, *features.deepstack]


def test_main_features_and_every_deepstack_level_are_the_references(pair: Pair) -> None:
    reference, model = pair
    with torch.no_grad():
        expected = reference.model.visual(
            torch.cat([pixel_values(pixels_of(grid)) for grid in GRIDS]), grid_thw=torch.tensor(GRIDS)
        )
    features = encode_all(model, GRIDS, blocks=100)
    assert [f.num_tokens for f in features] == [t * h * w // 4 for t, h, w in GRIDS]
    got = [torch.cat(level) for level in zip(*(levels(f) for f in features), strict=True)]
    want = [expected.pooler_output, *expected.deepstack_features]
    assert len(got) == len(want) == 4
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND * scale, msg=lambda m, n=number: f"level {n}: {m}")


def test_an_item_may_stop_between_any_two_blocks_and_advance_alone_or_with_others(pair: Pair) -> None:
    _, model = pair
    together = encode_all(model, GRIDS[:3], blocks=100)
    stepwise = encode_all(model, GRIDS[:3], blocks=1)
    alone = [encode_all(model, [grid], blocks=2)[0] for grid in GRIDS[:3]]
    for a, b, c in zip(together, stepwise, alone, strict=True):
        for x, y, z in zip(levels(a), levels(b), levels(c), strict=True):
            bound = 1e-5 * max(1.0, float(x.abs().max()))
            torch.testing.assert_close(x, y, rtol=0, atol=bound)
            torch.testing.assert_close(x, z, rtol=0, atol=bound)


def test_features_have_the_bytes_that_were_announced(pair: Pair) -> None:
    _, model = pair
    (features,) = encode_all(model, [(1, 4, 6)], blocks=100)
    assert features.num_bytes == model.vision.feature_bytes(6)


def test_items_keep_only_their_own_memory(pair: Pair) -> None:
    """What leaves a batch is not a view of all its members."""
    _, model = pair
    states = [model.vision.begin(pixels_of(grid), grid) for grid in GRIDS[:2]]
    for blocks in (1, 100):
        model.vision.advance(states, blocks)
        for state in states:
            kept = [x for x in (state.pixels, state.hidden, state.main, *state.deepstack) if x is not None]
            assert kept
            assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)
            assert state.num_bytes == sum(tensor.nbytes for tensor in kept)


def test_misuse_is_refused(pair: Pair) -> None:
    _, model = pair
    ahead, behind = (model.vision.begin(pixels_of((1, 2, 2)), (1, 2, 2)) for _ in range(2))
    model.vision.advance(ahead, 1)
    assert isinstance(ahead, VisionState)
    assert not ahead.done
    cases: list[Callable[[], object]] = [
        lambda: model.vision.advance([ahead, behind], 1),
        lambda: model.vision.finish(ahead),
        lambda: model.vision.begin(pixels_of((1, 2, 2)), (1, 2, 4)),
        lambda: model.vision.begin(random_pixels((1, 1, 4), 1), (1, 1, 4)),
    ]
    for case in cases:
        with pytest.raises(ValueError):
            case()


def test_a_pixel_table_says_what_a_byte_means(tmp_path: Path) -> None:
    mean, std = [0.48, 0.45, 0.40], [0.26, 0.27, 0.28]
    table = pixel_table_of(mean, std)
    value = (torch.arange(256).unsqueeze(1) / 255 - torch.tensor(mean)) / torch.tensor(std)
    torch.testing.assert_close(table, value)
    tiny_model("2b").save_pretrained(tmp_path)
    ops = make_ops("torch", "cpu")
    plain = Qwen3VL.load(tmp_path, "cpu", torch.float32, ops)
    swapped = Qwen3VL.load(tmp_path, "cpu", torch.float32, ops, pixel_table=pixel_table_of([0.5] * 3, [-0.5] * 3))
    pixels = random_pixels((1, 2, 2), 1)
    states = [swapped.vision.begin(pixels, (1, 2, 2)), plain.vision.begin(255 - pixels, (1, 2, 2))]
    swapped.vision.advance(states[0], 1)
    plain.vision.advance(states[1], 1)
    torch.testing.assert_close(states[0].hidden, states[1].hidden)


def test_items_larger_than_an_embedding_batch_are_embedded_in_several(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair
    whole = encode_all(model, GRIDS, blocks=100)
    monkeypatch.setattr(vision, "EMBEDDED_PATCHES", 7)
    for once, pieces in zip(whole, encode_all(model, GRIDS, blocks=100), strict=True):
        for x, y in zip(levels(once), levels(pieces), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * max(1.0, float(x.abs().max())))


def test_frame_sizes_are_remembered_up_to_a_number_of_patches() -> None:
    frames = FrameTable(torch.randn((81, 8)), merge=2, head_dim=8, rope_theta=1e4)
    first = frames.get(64, 64)
    assert frames.get(64, 64) is first
    for h in range(66, 78, 2):
        frames.get(h, 64)
    again = frames.get(64, 64)
    assert again is not first
    torch.testing.assert_close(again.places, first.places, rtol=0, atol=0)
    assert frames.get(256, 128) is not frames.get(256, 128)


def test_the_position_table_is_stretched_like_interpolate_with_aligned_corners() -> None:
    side, hidden, merge = 9, 5, 2
    table = torch.randn((side * side, hidden), generator=torch.Generator().manual_seed(0))
    for h, w in ((2, 2), (4, 6), (18, 10), (9 * 2, 2)):
        picture = table.t().view(1, hidden, side, side)
        raster = torch.nn.functional.interpolate(picture, size=(h, w), mode="bilinear", align_corners=True)[0]
        places = patch_positions(h, w, merge, torch.device("cpu"))
        torch.testing.assert_close(resample_table(table, h, w, merge), raster[:, places[:, 0], places[:, 1]].t())


def test_patches_of_one_token_lie_side_by_side() -> None:
    places = patch_positions(4, 4, 2, torch.device("cpu")).tolist()
    assert places[:8] == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert sorted(places) == [[row, column] for row in range(4) for column in range(4)]
