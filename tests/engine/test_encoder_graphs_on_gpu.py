"""The encoder's graphs on a GPU: a tower of an 8B model's shape with random weights, and an engine's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_support import running_engine
from reference import random_pixels
from reference_answers import small_pictures
from torch import Tensor

from prism_server.engine.encoder_graphs import PATCHES, RUNS, EncoderGraphs, capture_encoder, spans
from prism_server.engine.runner import Runner
from prism_server.model import Features, VisionState
from prism_server.model.config import VisionConfig
from prism_server.model.loader import _vision_shapes
from prism_server.model.random_weights import random_tensors
from prism_server.model.vision import VisionTower
from prism_server.ops import make_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
Grid = tuple[int, int, int]
SHAPE = VisionConfig(27, 1152, 4304, 16, 48 * 48, (8, 16, 24), out_hidden_size=4096)
EIGHT_PICTURES: list[Grid] = [(1, 28, 28)] * 8
EXACT = EncoderGraphs()
ON_GPU: dict[str, Any] = {
    "model__device": "cuda",
    "kv__dtype": "fp8",
    "kv__page_tokens": 64,
    "engine__max_running_sequences": 8,
    "engine__max_graph_tokens": 128,
    "engine__max_step_tokens": 2048,
}
SAME = 1e-2
"""Relative: what the same kernels make of the same rows beside other ones, where cuBLAS may choose otherwise."""


def tower_of(dtype: torch.dtype, backend: str) -> VisionTower:
    """Weights are BF16 numbers in either type."""
    weights = random_tensors(_vision_shapes(SHAPE), "cuda", torch.bfloat16)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    return VisionTower(SHAPE, weights, make_ops(backend, "cuda"), torch.device("cuda"))


@dataclass
class Captured:
    tower: VisionTower
    graphs: EncoderGraphs
    stream: torch.cuda.Stream


@pytest.fixture(scope="module")
def captured() -> Captured:
    tower, stream = tower_of(torch.bfloat16, "triton"), torch.cuda.Stream()
    torch.cuda.synchronize()
    graphs = capture_encoder(tower, sorted(PATCHES, reverse=True), stream, lambda done: None)
    return Captured(tower, graphs, stream)


def begun(tower: VisionTower, grids: Sequence[Grid]) -> list[VisionState]:
    pixels = [random_pixels(grid, 2 if grid[0] > 1 else 1, seed).pin_memory() for seed, grid in enumerate(grids, 1)]
    return [tower.begin(own, grid) for own, grid in zip(pixels, grids, strict=True)]


def advance(tower: VisionTower, graphs: EncoderGraphs, states: Sequence[VisionState], blocks: int) -> None:
    for batch, padded in graphs.batches(states):
        tower.advance(batch, blocks, padded)


def encoded(tower: VisionTower, graphs: EncoderGraphs, grids: Sequence[Grid], stops: Sequence[int]) -> list[Features]:
    states = begun(tower, grids)
    for blocks in (*stops, SHAPE.depth):
        advance(tower, graphs, states, blocks)
    return [tower.finish(state) for state in states]


def levels(features: Sequence[Features]) -> list[Tensor]:
    """Main and every DeepStack level, of all items; the device has done its work, so that any stream may read them."""
    whole = [torch.cat(parts) for parts in zip(*((item.main, *item.deepstack) for item in features), strict=True)]
    torch.cuda.synchronize()
    return whole


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def random_grids(seed: int) -> list[Grid]:
    rng = random.Random(seed)
    side = [2 * rng.randint(1, 20) for _ in range(2 * rng.randint(1, 9))]
    return [(rng.choice([1, 1, 1, 4]), h, w) for h, w in zip(side[::2], side[1::2], strict=True)]


def test_every_size_is_captured_and_the_whole_tower_is_few_replays(captured: Captured) -> None:
    assert captured.graphs.sizes == PATCHES
    assert len(captured.graphs) == (SHAPE.depth + RUNS) * len(PATCHES)
    assert len(list(spans(0, SHAPE.depth, SHAPE.depth))) == RUNS


def test_graphs_are_as_near_to_full_precision_as_the_eager_twin(captured: Captured) -> None:
    """For random pictures and clips, in random stops."""
    oracle = tower_of(torch.float32, "torch")
    for seed in range(4):
        grids, rng = random_grids(seed), random.Random(seed)
        stops = [rng.randint(1, 12) for _ in range(rng.randint(0, 3))]
        wanted = levels(encoded(oracle, EXACT, grids, []))
        with torch.cuda.stream(captured.stream):
            eager = levels(encoded(captured.tower, EXACT, grids, stops))
            replayed = levels(encoded(captured.tower, captured.graphs, grids, stops))
        for exact, one, other in zip(wanted, eager, replayed, strict=True):
            assert relative_error(other, exact) < 1.5 * relative_error(one, exact) + 1e-3


def test_batches_that_take_turns_do_not_see_each_other(captured: Captured) -> None:
    groups = [EIGHT_PICTURES, [(1, 20, 30), (4, 8, 8)], EIGHT_PICTURES[:1], [(1, 40, 40)]]
    with torch.cuda.stream(captured.stream):
        alone = [levels(encoded(captured.tower, captured.graphs, grids, [])) for grids in groups]
        states = [begun(captured.tower, grids) for grids in groups]
        for blocks in (4, 1, 9, SHAPE.depth):
            for own in states:
                advance(captured.tower, captured.graphs, own, blocks)
        turns = [levels([captured.tower.finish(state) for state in own]) for own in states]
    for one, other in zip(turns, alone, strict=True):
        for got, expected in zip(one, other, strict=True):
            assert relative_error(got, expected) < SAME


def test_what_padding_holds_changes_nothing(captured: Captured) -> None:
    grids: list[Grid] = [(1, 28, 28), (1, 10, 12)]
    with torch.cuda.stream(captured.stream):
        expected = levels(encoded(captured.tower, captured.graphs, grids, []))
        ((_, padded),) = captured.graphs.batches(begun(captured.tower, grids))
        assert padded is not None
        with torch.inference_mode():
            padded.window.hidden.fill_(torch.nan)
            padded.window.levels.fill_(torch.nan)
        got = levels(encoded(captured.tower, captured.graphs, grids, []))
    for one, other in zip(got, expected, strict=True):
        assert relative_error(one, other) < SAME


def test_a_new_batch_compiles_nothing_and_its_replays_allocate_nothing(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    with torch.cuda.stream(captured.stream):
        encoded(captured.tower, captured.graphs, EIGHT_PICTURES, [])
        compiled: list[object] = []
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about))
        for seed in range(10, 16):
            grids = random_grids(seed)
            encoded(captured.tower, captured.graphs, grids, [5])
            for _, padded in captured.graphs.batches(begun(captured.tower, grids)):
                assert padded is not None
                before = allocations()
                padded.run(0, SHAPE.depth)
                assert allocations() == before
    torch.cuda.synchronize()
    assert compiled == []


def test_encoding_is_launched_while_the_device_still_works_on_what_came_before(captured: Captured) -> None:
    """Also: no call on the way waits for the device, by torch's own check."""
    with torch.cuda.stream(captured.stream):
        encoded(captured.tower, captured.graphs, EIGHT_PICTURES, [9])  # what is made once is made
        encoded(captured.tower, captured.graphs, EIGHT_PICTURES[:3], [])
        states = begun(captured.tower, EIGHT_PICTURES)
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        busy = torch.cuda.Event()
        busy.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            advance(captured.tower, captured.graphs, states, 9)
            advance(captured.tower, captured.graphs, states, SHAPE.depth)
            assert not busy.query(), "the launch has waited"
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(state.done for state in states)
    torch.cuda.synchronize()


@pytest.mark.parametrize("wanted", [True, False])
def test_an_engine_replays_its_encoder_unless_graphs_are_off(wanted: bool) -> None:
    with running_engine(num_pages=100, engine__graphs=wanted, **ON_GPU) as driver:
        runner = driver.engine._parts.executor
        assert isinstance(runner, Runner)
        if wanted and not runner.model.ops.supports_graphs:
            pytest.skip(f"the backend {driver.engine.info.backend} has no graphs")
        assert runner.encoder.graphs.sizes == (PATCHES if wanted else ())
        taken: list[bool] = []
        batches = runner.encoder.graphs.batches

        def watched(states: Sequence[VisionState]) -> Any:
            found = batches(states)
            taken.extend(padded is not None for _, padded in found)
            return found

        runner.encoder.graphs.batches = watched  # type: ignore[method-assign]
        assert driver.ask([*small_pictures(3, 2), "What is shown?"], 4).tokens
        assert taken
        assert all(taken) == wanted
