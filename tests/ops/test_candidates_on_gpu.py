"""Greedy tokens by an FP8 copy of the head, on a GPU, in the shapes of the models: those that float64 names."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from product_cases import STEP_ROUNDING, normal, rows_with_outliers
from torch import Tensor

from prism_server.ops import Fp8Head, make_ops
from prism_server.ops.triton import candidates, linear, select
from prism_server.ops.triton.linear_configs import ROW_BUCKETS, ProductConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

EPS = 1e-6
VOCAB = 151_936
SHAPES = {"demo": (1024, 256), "2b": (VOCAB, 2048), "4b": (VOCAB, 2560), "8b": (VOCAB, 4096), "32b": (VOCAB, 5120)}
"""Vocabulary and hidden size."""
CUTS = (
    ProductConfig(16, 32, num_warps=1, tma=False),
    ProductConfig(64, 128, num_stages=4, tma=False),
    ProductConfig(64, 256, num_stages=3),
    ProductConfig(128, 64, num_warps=8),
    ProductConfig(256, 32, num_warps=8),
)


def random_head(vocab_size: int, depth: int, seed: int) -> Fp8Head:
    return Fp8Head.of(normal(vocab_size, depth, seed=seed, scale=depth**-0.5))


def assert_best(found: Tensor, x: Tensor, norm: Tensor, head: Fp8Head) -> None:
    """No token is better by more than rounding, by exact sums over the rows as they were rounded to bf16."""
    normed = candidates._normed(x, norm, EPS)[0].double()
    steps = x.shape[1] / 16
    highest = torch.full((len(x),), -torch.inf, dtype=torch.float64, device="cuda")
    for begin in range(0, head.vocab_size, 8192):
        weight = head.weight[begin : begin + 8192].double()
        least = normed @ weight.T - 2 * STEP_ROUNDING * steps * (normed.abs() @ weight.abs().T)
        highest = torch.maximum(highest, least.amax(dim=-1))
    own = (normed * head.weight[found].double()).sum(dim=-1)
    assert (own >= highest).all(), f"rows {(own < highest).nonzero().flatten().tolist()} have a better token"


def row_counts(seed: int) -> list[int]:
    """One, a full kernel, and one at random of every bucket."""
    chance = random.Random(seed)
    return sorted({1, 128, *(chance.randint(bucket // 2 + 1, bucket) for bucket in ROW_BUCKETS)})


@pytest.mark.parametrize("name", SHAPES)
def test_the_tokens_are_the_best_and_those_of_the_head_itself(name: str) -> None:
    vocab_size, depth = SHAPES[name]
    head, norm = random_head(vocab_size, depth, seed=1), normal(depth, seed=2)
    for num_rows in row_counts(3):
        x = rows_with_outliers(num_rows, depth, seed=num_rows, times=50)
        found = candidates.norm_best(x, norm, EPS, head)
        assert_best(found, x, norm, head)
        assert torch.equal(found, select.argmax(linear.norm_logits(x, norm, EPS, head.weight)))


@pytest.mark.parametrize("seed", range(8))
def test_random_vocabularies_that_no_tile_divides(seed: int) -> None:
    chance = random.Random(seed)
    vocab_size, depth = chance.randint(1, 20_000), 32 * chance.randint(1, 200)
    head, norm = random_head(vocab_size, depth, seed=seed), normal(depth, seed=2)
    x = rows_with_outliers(chance.randint(1, 128), depth, seed=seed, times=50)
    assert_best(candidates.norm_best(x, norm, EPS, head), x, norm, head)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_way_to_cut_gives_the_best_tokens(cut: ProductConfig) -> None:
    head, norm = random_head(50_007, 4096, seed=1), normal(4096, seed=2)
    for num_rows in (1, 20):
        x = rows_with_outliers(num_rows, 4096, seed=3, times=50)
        assert_best(candidates.norm_best(x, norm, EPS, head, cut), x, norm, head)


def test_tokens_that_the_copy_cannot_tell_apart_are_ranked_by_the_head() -> None:
    """Four of one tile, or anywhere; they differ in the last places of some of their numbers."""
    depth, num_rows = 4096, 40
    x, norm = normal(num_rows, depth, seed=1), torch.ones(depth, dtype=torch.bfloat16, device="cuda")
    weight = normal(VOCAB, depth, seed=2, scale=0.02)
    chance = random.Random(4)
    for row in range(num_rows):
        likely = x[row] * 0.02
        begin = chance.randrange(0, VOCAB - 64, 64)
        tokens = [begin + place for place in (0, 7, 8, 63)] if row % 2 else chance.sample(range(VOCAB), 4)
        for number, token in enumerate(chance.sample(tokens, 4)):
            weight[token] = likely
            weight[token].view(torch.int16)[: 512 * number] += 1
    head = Fp8Head.of(weight)
    assert_best(candidates.norm_best(x, norm, EPS, head), x, norm, head)


def test_of_equals_the_lowest_id_is_taken_and_zeros_are_equals() -> None:
    x, norm = normal(3, 4096, seed=1), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    weight = normal(VOCAB, 4096, seed=2, scale=0.02)
    for row, tokens in enumerate(([151_935, 70_003, 70_001, 70_002, 70_000, 70_010], [150_000, 9])):
        weight[tokens] = x[row]
    x[2] = 0
    assert candidates.norm_best(x, norm, EPS, Fp8Head.of(weight)).tolist() == [70_000, 9, 0]


@pytest.mark.parametrize("norm_scale", [1e-25, 1e4, 1e25])
def test_no_magnitude_of_the_norm_is_too_large_or_too_small(norm_scale: float) -> None:
    head, norm = random_head(VOCAB, 2048, seed=1), normal(2048, seed=2, scale=norm_scale)
    x = rows_with_outliers(9, 2048, seed=3, times=50)
    assert_best(candidates.norm_best(x, norm, EPS, head), x, norm, head)


def test_a_row_does_not_depend_on_the_rows_beside_it_and_again_is_the_same() -> None:
    head, norm, x = random_head(VOCAB, 4096, seed=1), normal(4096, seed=2), normal(128, 4096, seed=3)
    whole = candidates.norm_best(x, norm, EPS, head)
    for num_rows in (1, 9, 16, 17, 40, 64, 100, 128):
        assert all(torch.equal(candidates.norm_best(x[:num_rows], norm, EPS, head), whole[:num_rows]) for _ in range(5))


def test_kernels_that_start_early_read_what_the_one_before_wrote() -> None:
    """In a graph, after a product that starts early, again and again with other rows."""
    depth = 2048
    head, norm = random_head(VOCAB, depth, seed=1), normal(depth, seed=2)
    square = normal(depth, depth, seed=3, scale=depth**-0.5)

    def tokens(x: Tensor) -> list[Tensor]:
        found = []
        for _ in range(3):
            x = linear.linear_add(x, square, x)
            found.append(candidates.norm_best(x, norm, EPS, head))
        return found

    for num_rows in (1, 16, 50):
        x = normal(num_rows, depth, seed=num_rows)
        tokens(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tokens(x)
        for seed in range(10):
            x.copy_(normal(num_rows, depth, seed=100 + seed))
            expected = tokens(x)
            torch.cuda.synchronize()
            graph.replay()
            assert all(map(torch.equal, out, expected))


def test_another_row_count_of_a_bucket_compiles_nothing() -> None:
    from triton import knobs

    head, norm, x = random_head(VOCAB, 2048, seed=1), normal(2048, seed=2), normal(128, 2048, seed=3)
    for bucket in ROW_BUCKETS:
        candidates.norm_best(x[:bucket], norm, EPS, head)
    compiled: list[object] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(args)
    try:
        for num_rows in (1, 2, 3, 15, 17, 31, 33, 48, 63, 65, 127):
            candidates.norm_best(x[:num_rows], norm, EPS, head)
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


@pytest.mark.parametrize(("num_rows", "dtype"), [(65, torch.bfloat16), (129, torch.bfloat16), (3, torch.float32)])
def test_what_the_kernels_do_not_take_or_are_slower_for_is_the_heads_own_product(
    num_rows: int, dtype: torch.dtype
) -> None:
    ops = make_ops("triton", "cuda")
    head, norm = Fp8Head.of(normal(5000, 256, seed=1).to(dtype)), normal(256, seed=2).to(dtype)
    head = replace(head, pairs=torch.zeros_like(head.pairs))  # by which no token is found
    x = normal(num_rows, 256, seed=3).to(dtype)
    assert torch.equal(ops.norm_best(x, norm, EPS, head), ops.argmax(ops.norm_logits(x, norm, EPS, head.weight)))
