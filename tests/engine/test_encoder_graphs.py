"""The encoder's padded blocks, on a CPU: what a graph would record is run launch by launch on the same buffers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from engine_support import Driver, agreement, running_engine, tokens_of
from reference import DEMO_CHECKPOINT, random_pixels, tiny_model
from reference_answers import draw_prompts, small_pictures

from prism_server.engine.cost_model import MAX_STEP_PATCHES
from prism_server.engine.encoder_graphs import PATCHES, EncoderGraphs, all_spans, spans
from prism_server.engine.runner import Runner
from prism_server.model import Features, Qwen3VL, VisionState
from prism_server.model.vision import VisionTower
from prism_server.ops import make_ops

Grid = tuple[int, int, int]
SIZES = (16, 64, 128)
GRIDS: list[Grid] = [(1, 4, 6), (1, 2, 2), (2, 6, 4), (1, 8, 6), (3, 2, 8)]
"""A batch of 172 patches in eight frames: more than the largest size."""


@pytest.fixture(scope="module", params=["2b", "8b", "demo"])
def tower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> VisionTower:
    directory = DEMO_CHECKPOINT
    if request.param != "demo":
        directory = tmp_path_factory.mktemp(request.param)
        tiny_model(request.param).save_pretrained(directory)
    return Qwen3VL.load(directory, "cpu", torch.float32, make_ops("torch", "cpu")).vision


def begun(tower: VisionTower, grids: Sequence[Grid]) -> list[VisionState]:
    return [tower.begin(random_pixels(grid, 2 if grid[0] > 1 else 1, seed), grid) for seed, grid in enumerate(grids, 1)]


def advance(tower: VisionTower, graphs: EncoderGraphs, states: Sequence[VisionState], blocks: int) -> None:
    for batch, padded in graphs.batches(states):
        tower.advance(batch, blocks, padded)


def encoded(tower: VisionTower, graphs: EncoderGraphs, grids: Sequence[Grid], blocks: int) -> list[Features]:
    states = begun(tower, grids)
    while not states[0].done:
        advance(tower, graphs, states, blocks)
    return [tower.finish(state) for state in states]


def assert_alike(got: Sequence[Features], expected: Sequence[Features]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert len(one.deepstack) == len(other.deepstack)
        for x, y in zip((one.main, *one.deepstack), (other.main, *other.deepstack), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * max(1.0, float(y.abs().max())))


@pytest.mark.parametrize("blocks", [1, 2, 100])
def test_padded_blocks_give_the_features_of_exact_ones_wherever_they_stop(tower: VisionTower, blocks: int) -> None:
    graphs, exact = EncoderGraphs.twin(tower, SIZES), EncoderGraphs()
    for grids in (GRIDS, GRIDS[:1], GRIDS[1:3], GRIDS[::-1]):
        assert_alike(encoded(tower, graphs, grids, blocks), encoded(tower, exact, grids, 100))


def test_batches_that_take_turns_on_one_canvas_do_not_see_each_other(tower: VisionTower) -> None:
    graphs, exact = EncoderGraphs.twin(tower, SIZES), EncoderGraphs()
    groups = [GRIDS[:2], GRIDS[2:4], GRIDS[:1]]
    states = [begun(tower, grids) for grids in groups]
    while not states[0][0].done:
        for own in states:
            advance(tower, graphs, own, 1)
    for own, grids in zip(states, groups, strict=True):
        assert_alike([tower.finish(state) for state in own], encoded(tower, exact, grids, 100))


def test_what_padding_holds_changes_nothing(tower: VisionTower) -> None:
    graphs, exact = EncoderGraphs.twin(tower, SIZES), EncoderGraphs()
    for padded in graphs._ascending:
        padded.window.hidden.fill_(torch.nan)
        padded.window.levels.fill_(torch.nan)
    assert_alike(encoded(tower, graphs, GRIDS[:2], 2), encoded(tower, exact, GRIDS[:2], 100))


def test_what_leaves_the_canvas_is_the_items_own_memory(tower: VisionTower) -> None:
    graphs = EncoderGraphs.twin(tower, SIZES)
    states = begun(tower, GRIDS[:2])
    advance(tower, graphs, states, 1)
    kept = [state.hidden for state in states if state.hidden is not None]
    assert [x.untyped_storage().nbytes() for x in kept] == [x.nbytes for x in kept]
    advance(tower, graphs, states, 100)
    for state in states:
        features = tower.finish(state)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (features.main, *features.deepstack)}
        assert sum(storage.nbytes() for storage in storages.values()) == features.num_bytes
        assert features.num_bytes == tower.feature_bytes(features.num_tokens)


def test_items_go_together_as_far_as_there_is_room_and_without_a_graph_where_there_is_none(tower: VisionTower) -> None:
    graphs = EncoderGraphs.twin(tower, SIZES)
    grids: list[Grid] = [(1, 8, 8), (1, 8, 8), (1, 16, 10), (1, 2, 2), (1, 4, 4), (9, 2, 2), (1, 2, 2)]
    states = begun(tower, grids)
    grouped = [
        ([states.index(state) for state in batch], padded and padded.window.num_patches)
        for batch, padded in graphs.batches(states)
    ]
    assert grouped == [([0, 1], 128), ([3, 4, 6], 64), ([2, 5], None)]
    assert EncoderGraphs().batches(states) == [(states, None)]


def test_frames_that_attention_is_most_of_take_no_graph(tower: VisionTower, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = EncoderGraphs.twin(tower, SIZES)
    monkeypatch.setattr("prism_server.engine.encoder_graphs.MAX_SEGMENT_PATCHES", 24)
    states = begun(tower, [(1, 4, 6), (1, 4, 8), (2, 4, 6)])
    assert [(batch, padded is None) for batch, padded in graphs.batches(states)] == [
        ([states[0], states[2]], False),
        ([states[1]], True),
    ]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 24, 27])
def test_any_blocks_are_cut_into_graphs_that_there_are_and_the_whole_tower_into_three(depth: int) -> None:
    there = set(all_spans(depth))
    for first in range(depth):
        for last in range(first + 1, depth + 1):
            cut = list(spans(first, last, depth))
            assert (cut[0][0], cut[-1][1]) == (first, last)
            assert all(before[1] == after[0] for before, after in pairwise(cut))
            assert there.issuperset(cut)
    assert len(list(spans(0, depth, depth))) <= 3


def test_sizes_are_whole_tokens_and_cover_a_step() -> None:
    assert list(PATCHES) == sorted(PATCHES)
    assert PATCHES[-1] == MAX_STEP_PATCHES
    assert all(size % 16 == 0 for size in PATCHES)


def use_padded_blocks(driver: Driver, sizes: Sequence[int]) -> None:
    runner = driver.engine._parts.executor
    assert isinstance(runner, Runner)
    runner.encoder.graphs = EncoderGraphs.twin(runner.model.vision, sizes)


def test_an_engine_with_padded_blocks_says_what_one_without_them_says() -> None:
    rng = random.Random(1)
    prompts = [*draw_prompts(seed=5, count=8, most_vision_tokens=60), [*small_pictures(9, 4), "What is shown?"]]
    most = [rng.randint(6, 12) for _ in prompts]
    replies = []
    for padded in (False, True):
        with running_engine() as driver:
            if padded:
                use_padded_blocks(driver, (32, 128, 256))
            sent = [driver.submit(parts, count) for parts, count in zip(prompts, most, strict=True)]
            replies.append([reply.wait() for reply in sent])
    assert agreement(replies[1], tokens_of(replies[0])) >= 0.97


def test_many_small_frames_are_not_padded_to_a_size_that_is_mostly_empty(tower: VisionTower) -> None:
    """A window has room for few frames: one that had room for these would be many times their patches."""
    graphs = EncoderGraphs.twin(tower, (256, 512, 4096))
    small, large = begun(tower, [(20, 2, 2)]), begun(tower, [(1, 50, 50)])
    ((items, padded),) = graphs.batches(small)
    assert (items, padded) == (small, None)
    ((_, padded),) = graphs.batches(large)
    assert padded is not None
