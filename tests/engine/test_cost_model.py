"""A step's time budget, turned into work by what steps were seen to cost."""

from __future__ import annotations

import pytest

from prism_server.engine.cost_model import MIN_CHUNK_TOKENS, SHORT_CHUNK_TOKENS, CostModel, Observation

MAX_TOKENS = 4096


def learned(base_ms: float = 5.0, ms_per_token: float = 0.05, ms_per_patch_block: float = 0.001) -> CostModel:
    model = CostModel(20.0, MAX_TOKENS)
    for _ in range(50):
        model.observe(Observation(8, 0, 0, base_ms, 0.0))
        model.observe(Observation(8, 400, 0, base_ms + 400 * ms_per_token, 0.0))
        model.observe(Observation(8, 0, 10_000, base_ms, 10_000 * ms_per_patch_block))
    return model


def test_with_nothing_that_decodes_only_sizes_bound_a_step() -> None:
    budget = learned().budget(0)
    assert budget.chunk_tokens == MAX_TOKENS
    assert budget.take_blocks(4096, 27) == 27


def test_beside_decodes_a_chunk_takes_what_is_left_of_the_budget() -> None:
    budget = learned().budget(8)
    assert 280 <= budget.chunk_tokens <= 300  # (20 - 5) ms / 0.05 ms
    budget.take_tokens(250)
    assert 30 <= budget.chunk_tokens <= 50
    budget.take_tokens(budget.chunk_tokens)
    assert budget.chunk_tokens <= 1


def test_a_prefill_beside_decodes_always_gets_a_least_chunk_so_that_it_ends() -> None:
    budget = learned(base_ms=100.0).budget(8)
    assert budget.chunk_tokens == MIN_CHUNK_TOKENS
    budget.take_tokens(MIN_CHUNK_TOKENS)
    assert budget.chunk_tokens == 0


def test_short_prefills_share_the_least_chunk() -> None:
    budget = learned(base_ms=100.0).budget(8)
    budget.take_tokens(10)
    assert budget.chunk_tokens == MIN_CHUNK_TOKENS - 10


def test_a_large_picture_beside_decodes_is_cut_by_blocks_and_moves_at_least_one_block_a_step() -> None:
    budget = learned().budget(8)
    assert 2 <= budget.take_blocks(4096, 27) <= 4  # 15 ms / 4.1 ms a block
    slow = learned(ms_per_patch_block=1.0).budget(8)
    assert slow.take_blocks(4096, 27) == 1
    assert slow.take_blocks(4096, 27) == 0, "the next item waits for the next step"


def test_encoding_and_prefill_share_one_budget() -> None:
    budget = learned().budget(8)
    budget.take_tokens(280)
    assert budget.take_blocks(1000, 27) <= 1


def test_nothing_known_yet_means_nothing_is_held_back() -> None:
    budget = CostModel(20.0, MAX_TOKENS).budget(4)
    assert budget.chunk_tokens == MAX_TOKENS - 4
    assert budget.take_blocks(1024, 6) == 6


def test_a_short_chunk_hides_behind_the_weights_and_may_raise_the_estimate_but_not_lower_it() -> None:
    model = learned(ms_per_token=0.02)
    for _ in range(50):
        model.observe(Observation(8, SHORT_CHUNK_TOKENS - 1, 0, 5.1, 0.0))
    assert model.ms_per_token == pytest.approx(0.02, rel=1e-4)
    for _ in range(50):
        model.observe(Observation(8, SHORT_CHUNK_TOKENS - 1, 0, 5.0 + (SHORT_CHUNK_TOKENS - 1) * 0.03, 0.0))
    assert model.ms_per_token == pytest.approx(0.03, rel=1e-4)
    for _ in range(50):
        model.observe(Observation(8, SHORT_CHUNK_TOKENS, 0, 5.0 + SHORT_CHUNK_TOKENS * 0.025, 0.0))
    assert model.ms_per_token == pytest.approx(0.025, rel=1e-4)


def test_a_step_that_only_encodes_is_no_sign_of_graphs() -> None:
    cost = CostModel(step_budget_ms=20.0, max_step_tokens=8192)
    cost.observe(Observation(0, 0, 10_000, 0.0, 10.0, eager=False))
    cost.observe(Observation(0, 512, 0, 17.0, 0.0))
    assert cost.ms_per_token == pytest.approx(17.0 / 512)


def test_where_graphs_are_replayed_a_small_eager_step_says_nothing_of_the_cost_of_a_token() -> None:
    cost = CostModel(step_budget_ms=20.0, max_step_tokens=8192)
    cost.observe(Observation(1, 0, 0, 5.0, 0.0, eager=False))
    cost.observe(Observation(0, 512, 0, 17.0, 0.0, eager=False))
    before = cost.ms_per_token
    cost.observe(Observation(8, 64, 0, 25.0, 0.0, eager=True))
    assert cost.ms_per_token == before
    cost.observe(Observation(0, 2048, 0, 70.0, 0.0, eager=True))
    assert cost.ms_per_token > before


def test_a_step_is_no_larger_than_the_largest_graph() -> None:
    cost = CostModel(step_budget_ms=1e6, max_step_tokens=8192, max_replayed_tokens=1024)
    assert cost.budget(0).tokens == 1024
    assert cost.budget(24).chunk_tokens == 1000
    assert cost.budget(2000).chunk_tokens >= 1, "a prefill always goes on"
    assert CostModel(step_budget_ms=1e6, max_step_tokens=8192).budget(24).tokens == 8168
