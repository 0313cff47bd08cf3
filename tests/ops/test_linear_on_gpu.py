"""Skinny products on a GPU, in the shapes of the five models, against float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from product_cases import STEP_ROUNDING, normal, rows_with_outliers
from torch import Tensor
from torch.nn import functional as F

from prism_server.ops.triton import linear
from prism_server.ops.triton.linear_configs import ROW_BUCKETS, ProductConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

EPS = 1e-6
BF16_ROUNDING = 2.0**-9
"""Largest relative error of rounding to bf16; its standard deviation is smaller than half of it."""


@dataclass(frozen=True)
class Model:
    hidden: int
    qkv: int
    attended: int
    inner: int
    vocab: int


MODELS = {
    "demo": Model(256, 1024, 512, 640, 1024),
    "2b": Model(2048, 4096, 2048, 6144, 151936),
    "4b": Model(2560, 6144, 4096, 9728, 151936),
    "8b": Model(4096, 6144, 4096, 12288, 151936),
    "32b": Model(5120, 10240, 8192, 25600, 151936),
}


def normed(x: Tensor, norm: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS) * norm.double()


def exact_product(h: Tensor, weight: Tensor, rounded_input: bool) -> tuple[Tensor, Tensor]:
    """h [T, in] float64 times weight [out, in]; with the error that the sum of rounded factors may have.

    Roundings of the input are independent of each other: six standard deviations of their sum, and two roundings each.
    """
    exact = torch.empty(h.shape[0], weight.shape[0], dtype=torch.float64, device="cuda")
    error = torch.empty_like(exact)
    for begin in range(0, weight.shape[0], 8192):
        part = slice(begin, begin + 8192)
        wide = weight[part].double()
        exact[:, part] = h @ wide.T
        error[:, part] = STEP_ROUNDING * (h.shape[1] / 16) * (h.abs() @ wide.abs().T)
        if rounded_input:
            error[:, part] += 6 * BF16_ROUNDING * (h.square() @ wide.square().T).sqrt()
    return exact, error


def assert_within(out: Tensor, exact: Tensor, error: Tensor) -> None:
    """`error` of the value, and its last rounding to the type of `out`."""
    bound = error + exact.abs() * (2 * BF16_ROUNDING if out.dtype == torch.bfloat16 else 2.0**-22) + 1e-30
    excess = ((out.double() - exact).abs() / bound).max().item()
    assert excess <= 1, f"error is {excess:.2f} of the bound"


def row_counts(seed: int) -> list[int]:
    """One, a full kernel, and one at random of every bucket."""
    chance = random.Random(seed)
    return sorted({1, 128, *(chance.randint(bucket // 2 + 1, bucket) for bucket in ROW_BUCKETS), chance.randint(1, 16)})


@pytest.mark.parametrize("name", MODELS)
def test_norm_linear_is_within_the_bound(name: str) -> None:
    model = MODELS[name]
    weight, norm = normal(model.qkv, model.hidden, seed=1, scale=0.02), normal(model.hidden, seed=2)
    for num_rows in row_counts(3):
        x = rows_with_outliers(num_rows, model.hidden, seed=num_rows, times=1000)
        exact, error = exact_product(normed(x, norm), weight, rounded_input=True)
        assert_within(linear.norm_linear(x, norm, EPS, weight), exact, error)


@pytest.mark.parametrize("side", ["out", "down"])
@pytest.mark.parametrize("name", MODELS)
def test_linear_add_is_within_the_bound(name: str, side: str) -> None:
    model = MODELS[name]
    depth = model.attended if side == "out" else model.inner
    weight = normal(model.hidden, depth, seed=1, scale=0.02)
    for num_rows in row_counts(4):
        x = rows_with_outliers(num_rows, depth, seed=num_rows, times=1000)
        residual = normal(num_rows, model.hidden, seed=5, scale=10)
        exact, error = exact_product(x.double(), weight, rounded_input=False)
        assert_within(linear.linear_add(x, weight, residual), exact + residual.double(), error)


@pytest.mark.parametrize("name", MODELS)
def test_norm_swiglu_is_within_the_bound(name: str) -> None:
    model = MODELS[name]
    gate_up, norm = normal(2 * model.inner, model.hidden, seed=1, scale=0.02), normal(model.hidden, seed=2)
    for num_rows in row_counts(6):
        x = rows_with_outliers(num_rows, model.hidden, seed=num_rows, times=1000)
        exact, error = exact_product(normed(x, norm), gate_up, rounded_input=True)
        (gate, up), (gate_error, up_error) = exact.chunk(2, dim=-1), error.chunk(2, dim=-1)
        # silu is nowhere steeper than 1.1, and its float32 exponential is good to 1e-5
        silu_error = 1.1 * gate_error + 1e-5 * F.silu(gate).abs()
        combined = silu_error * up.abs() + F.silu(gate).abs() * up_error + silu_error * up_error
        assert_within(linear.norm_swiglu(x, norm, EPS, gate_up), F.silu(gate) * up, combined)


@pytest.mark.parametrize("name", MODELS)
def test_norm_logits_is_within_the_bound_and_float32(name: str) -> None:
    model = MODELS[name]
    head, norm = normal(model.vocab, model.hidden, seed=1, scale=0.02), normal(model.hidden, seed=2)
    for num_rows in (1, random.Random(7).randint(2, 128)):
        x = rows_with_outliers(num_rows, model.hidden, seed=num_rows, times=1000)
        logits = linear.norm_logits(x, norm, EPS, head)
        assert logits.dtype == torch.float32
        exact, error = exact_product(normed(x, norm), head, rounded_input=True)
        assert_within(logits, exact, error)


OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "norm_linear": lambda x, norm, weight: linear.norm_linear(x, norm, EPS, weight),
    "norm_swiglu": lambda x, norm, weight: linear.norm_swiglu(x, norm, EPS, weight),
    "linear_add": lambda x, norm, weight: linear.linear_add(x, weight, x),
    "norm_logits": lambda x, norm, weight: linear.norm_logits(x, norm, EPS, weight),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_row_does_not_depend_on_the_rows_beside_it(operator: str) -> None:
    run = OPERATORS[operator]
    x, norm, weight = normal(128, 4096, seed=1), normal(4096, seed=2), normal(4096, 4096, seed=3, scale=0.02)
    whole = {bucket: run(x[:bucket], norm, weight) for bucket in ROW_BUCKETS}
    for bucket in ROW_BUCKETS:
        for num_rows in (bucket // 2 + 1, bucket - 1):
            assert torch.equal(run(x[:num_rows], norm, weight), whole[bucket][:num_rows])
    for row in range(16):
        assert torch.equal(run(x[row : row + 1], norm, weight)[0], whole[16][row])
    for bucket in ROW_BUCKETS[
        1:
    ]:  # another kernel: the same sums in the same order, the norm perhaps rounded elsewhere
        difference = (whole[bucket][:16].double() - whole[16].double()).abs()
        assert (difference <= 2.0**-7 * whole[16].double().abs() + 0.03).all()


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_same_product_again_is_the_same_to_the_bit(operator: str) -> None:
    run = OPERATORS[operator]
    x, norm, weight = normal(70, 4096, seed=1), normal(4096, seed=2), normal(4096, 4096, seed=3, scale=0.02)
    for num_rows in (1, 20, 40, 70):
        first = run(x[:num_rows], norm, weight)
        assert all(torch.equal(run(x[:num_rows], norm, weight), first) for _ in range(20))


CUTS = (
    ProductConfig(16, 256, num_stages=3, fused_norm=True, tma=False),
    ProductConfig(32, 256, num_warps=2, fused_norm=True),
    ProductConfig(64, 128, num_warps=8, fused_norm=True, prefetch_columns=2048),
    ProductConfig(64, 128, split_k=2, tma=False),
    ProductConfig(128, 64, split_k=4, prefetch_columns=0),
)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_way_to_cut_gives_the_product(cut: ProductConfig) -> None:
    """Of a number of outputs that no block divides."""
    x, norm = rows_with_outliers(20, 4096, seed=1, times=1000), normal(4096, seed=2)
    gate_up, residual = normal(2 * 4040, 4096, seed=3, scale=0.02), normal(20, 8080, seed=4)
    exact, error = exact_product(normed(x, norm), gate_up, rounded_input=True)
    assert_within(linear.product(x, gate_up, cut, norm=norm, eps=EPS), exact, error)
    gate, up = linear.product(x, gate_up, cut, norm=norm, eps=EPS, out_dtype=torch.float32).chunk(2, dim=-1)
    swiglu = linear.product(x, gate_up, cut, norm=norm, eps=EPS, swiglu=True)
    torch.testing.assert_close(swiglu.float(), F.silu(gate) * up, atol=1e-6, rtol=2.0**-8)
    exact, error = exact_product(x.double(), gate_up, rounded_input=False)
    assert_within(linear.product(x, gate_up, cut, residual=residual), exact + residual.double(), error)


def test_products_that_start_early_read_what_the_one_before_wrote() -> None:
    """A chain of small products in a graph, where each starts while the one before runs, again and again."""
    hidden, inner, num_layers = 1024, 2048, 4
    norm = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
    layers = [
        (
            normal(hidden, hidden, seed=layer, scale=0.05),
            normal(2 * inner, hidden, seed=10 + layer, scale=0.05),
            normal(hidden, inner, seed=20 + layer, scale=0.05),
        )
        for layer in range(num_layers)
    ]

    def chain(x: Tensor, wait: bool) -> Tensor:
        for square, gate_up, down in layers:
            for step in (
                lambda h, square=square: linear.linear_add(linear.norm_linear(h, norm, EPS, square), square, h),
                lambda h, gate_up=gate_up, down=down: linear.linear_add(
                    linear.norm_swiglu(h, norm, EPS, gate_up), down, h
                ),
            ):
                x = step(x)
                if wait:
                    torch.cuda.synchronize()
        return x

    for num_rows in (1, 16, 50):
        x = normal(num_rows, hidden, seed=num_rows)
        chain(x, wait=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(x, wait=False)
        for seed in range(10):
            x.copy_(normal(num_rows, hidden, seed=100 + seed))
            expected = chain(x, wait=True)
            out.zero_()
            graph.replay()
            assert torch.equal(out, expected)


def test_another_row_count_of_a_bucket_compiles_nothing() -> None:
    from prism_server.ops.triton.kernels.linear import skinny_product

    x, norm, weight = normal(128, 4096, seed=1), normal(4096, seed=2), normal(4096, 4096, seed=3, scale=0.02)
    for bucket in ROW_BUCKETS:
        linear.norm_linear(x[:bucket], norm, EPS, weight)
        kernels = len(skinny_product.device_caches[torch.cuda.current_device()][0])
        for num_rows in range(bucket // 2 + 1 if bucket > 16 else 1, bucket):
            linear.norm_linear(x[:num_rows], norm, EPS, weight)
        assert len(skinny_product.device_caches[torch.cuda.current_device()][0]) == kernels
