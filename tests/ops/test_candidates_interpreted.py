"""Greedy tokens by an FP8 copy of the head, in Triton's interpreter: the tokens that the head itself names."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from prism_server.ops import Fp8Head
from prism_server.ops.torch_ops import TorchOps
from prism_server.ops.triton import candidates
from prism_server.ops.triton.linear_configs import ROW_BUCKETS, ProductConfig
from prism_server.ops.triton.ops import TritonOps

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity, in NumPy
EPS = 1e-6
DEPTH, VOCAB, GROUPS = 96, 205, 2
SMALL = ProductConfig(16, 16, tma=False)
CUTS = {
    "plain": SMALL,
    "tma": ProductConfig(16, 16),
    "wide": ProductConfig(32, 16, num_warps=8, tma=False),
}
ROUNDING = 4e-6
"""Of float32 sums, relative to the sum of magnitudes: tokens nearer to each other may change places."""


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().to(DEVICE)


def ones(depth: int = DEPTH) -> Tensor:
    return torch.ones(depth, dtype=torch.bfloat16, device=DEVICE)


def best(x: Tensor, norm: Tensor, weight: Tensor, cut: ProductConfig = SMALL) -> list[int]:
    return candidates.norm_best(x, norm, EPS, Fp8Head.of(weight), cut, GROUPS).tolist()


def assert_best(found: list[int], x: Tensor, norm: Tensor, weight: Tensor) -> None:
    """No token is better by more than rounding, by exact sums over the rows as they were rounded to bf16."""
    normed = candidates._normed(x, norm, EPS)[0].double()
    exact, magnitude = normed @ weight.double().T, normed.abs() @ weight.double().abs().T
    for row, token in enumerate(found):
        assert 0 <= token < len(weight)
        assert exact[row, token] >= (exact[row] - ROUNDING * magnitude[row]).max()


@pytest.mark.parametrize("num_rows", [1, 5, 17])
@pytest.mark.parametrize("cut", CUTS)
def test_random_rows_get_the_best_token_of_the_head(cut: str, num_rows: int) -> None:
    x, norm, weight = normal(num_rows, DEPTH, seed=1, scale=7.0), normal(DEPTH, seed=2), normal(VOCAB, DEPTH, seed=3)
    assert_best(best(x, norm, weight, CUTS[cut]), x, norm, weight)


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 37, 64, 95])
def test_no_tile_and_no_group_need_be_full(vocab_size: int) -> None:
    x, weight = normal(4, DEPTH, seed=1), normal(vocab_size, DEPTH, seed=vocab_size)
    assert_best(best(x, ones(), weight), x, ones(), weight)
    assert_best(best(x, ones(), -weight.abs()), x, ones(), -weight.abs())


def test_tokens_that_the_copy_cannot_tell_apart_are_ranked_by_the_head() -> None:
    """As many in one tile as stay candidates; they differ by the last place of a single number of theirs."""
    x = normal(3, DEPTH, seed=1)
    weight = normal(VOCAB, DEPTH, seed=2, scale=0.1)
    for row, first in enumerate((32, 33, 128)):
        likely = x[row] + normal(DEPTH, seed=10 + row, scale=0.01)
        for place in range(candidates.KEPT):
            token = first + 3 * place
            weight[token] = likely
            bits = weight[token].view(torch.int16)
            bits[7] += (3, 1, 0, 2)[(place + row) % 4]  # grows in magnitude
    copies = Fp8Head.of(weight).dequantised()[32 : 32 + 3 * candidates.KEPT : 3]
    assert len(copies.unique(dim=0)) < candidates.KEPT, "the copy tells all of them apart"
    assert_best(best(x, ones(), weight), x, ones(), weight)


def test_of_equal_tokens_the_lowest_id_is_taken_wherever_they_are() -> None:
    x, weight = normal(2, DEPTH, seed=1), normal(VOCAB, DEPTH, seed=2, scale=0.1)
    for token in (200, 21, 22, 23, 24, 25, 26, 27, 180):
        weight[token] = x[0]
    for token in (204, 203, 190):
        weight[token] = x[1]
    assert best(x, ones(), weight) == [21, 190]


def test_zeros_are_equals_in_rows_and_in_the_head() -> None:
    x, weight = normal(2, DEPTH, seed=1), normal(VOCAB, DEPTH, seed=2)
    x[0] = 0.0
    assert best(x, ones(), weight)[0] == 0
    assert best(x, ones(), torch.zeros_like(weight)) == [0, 0]
    negative = -weight * torch.sign(normal(1, DEPTH, seed=1)) * torch.sign(weight)
    negative[[70, 199]] = 0.0
    ahead = normal(1, DEPTH, seed=1)
    assert best(ahead, ones(), negative) == [70]


@pytest.mark.parametrize("norm_scale", [1e-25, 1.0, 1e4, 1e25])
@pytest.mark.parametrize("weight_scale", [1e-3, 1e9])
def test_no_magnitude_of_norm_and_weights_is_too_large_or_too_small(norm_scale: float, weight_scale: float) -> None:
    x, norm = normal(3, DEPTH, seed=1, scale=3e4), normal(DEPTH, seed=2, scale=norm_scale)
    weight = normal(VOCAB, DEPTH, seed=3, scale=weight_scale)
    assert_best(best(x, norm, weight), x, norm, weight)


def test_outlying_channels_and_tokens_hide_nothing() -> None:
    x, weight = normal(4, DEPTH, seed=1), normal(VOCAB, DEPTH, seed=2)
    x[:, [3, 50]] *= 300.0
    x[1] *= 1e-3
    weight[::7, 11] *= 200.0
    weight[5] *= 1e-3
    assert_best(best(x, ones(), weight), x, ones(), weight)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x, norm, weight = normal(7, DEPTH, seed=1), normal(DEPTH, seed=2), normal(VOCAB, DEPTH, seed=3)
    together = best(x, norm, weight)
    assert [best(x[row : row + 1], norm, weight)[0] for row in range(7)] == together


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_rows_get_tokens_of_the_vocabulary_and_break_no_other(value: float) -> None:
    x, weight = normal(2, DEPTH, seed=1), normal(VOCAB, DEPTH, seed=2)
    expected = best(x, ones(), weight)
    x[0, 5] = value
    found = best(x, ones(), weight)
    assert 0 <= found[0] < VOCAB
    assert found[1] == expected[1]


def test_the_operator_takes_the_cuts_for_serving() -> None:
    x, norm, weight = normal(2, DEPTH, seed=1), normal(DEPTH, seed=2), normal(320, DEPTH, seed=3)
    assert_best(candidates.norm_best(x, norm, EPS, Fp8Head.of(weight)).tolist(), x, norm, weight)
    assert set(candidates.CONFIGS) == set(ROW_BUCKETS)


def test_rows_of_which_the_copy_would_be_slower_take_the_head_itself() -> None:
    ops, weight = TritonOps(), normal(VOCAB, DEPTH, seed=1)
    blind = Fp8Head.of(weight)
    blind = replace(blind, pairs=torch.zeros_like(blind.pairs))  # by which no token is found
    x = normal(65, DEPTH, seed=2)
    expected = ops.argmax(ops.norm_logits(x, ones(), EPS, weight))
    assert torch.equal(ops.norm_best(x, ones(), EPS, blind), expected)
    assert not torch.equal(ops.norm_best(x[:-1], ones(), EPS, blind), expected[:-1])


def test_plain_torch_names_the_heads_best_tokens_too() -> None:
    ops = TorchOps()
    x, norm, weight = normal(9, DEPTH, seed=1).float(), normal(DEPTH, seed=2).float(), normal(VOCAB, DEPTH, seed=3)
    weight = weight.float()
    weight[[9, 200]] = x[0]
    found = ops.norm_best(x, norm, EPS, Fp8Head.of(weight))
    assert torch.equal(found, ops.argmax(ops.norm_logits(x, norm, EPS, weight)))
    assert ops.norm_best(x[:0], norm, EPS, Fp8Head.of(weight)).tolist() == []
    assert ops.norm_best(x * 0, norm, EPS, Fp8Head.of(weight)).tolist() == [0] * 9
