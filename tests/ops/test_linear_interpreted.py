"""Skinny products in Triton's interpreter: tiny shapes, every way to cut them."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.ops.triton import linear
from prism_server.ops.triton.linear_configs import CONFIGS, ROW_BUCKETS, ProductClass, ProductConfig

EPS = 1e-6
PLAIN = ProductConfig(16, 32, tma=False)
CUTS = {
    "plain": PLAIN,
    "tma": ProductConfig(16, 32, tma=True),
    "split": ProductConfig(16, 16, split_k=3, tma=True),
    "fused norm": ProductConfig(32, 32, fused_norm=True, tma=False),
    "blocks beyond the shape": ProductConfig(128, 64, tma=True),
}
DEPTH = 96


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().to(DEVICE)


def normed(x: Tensor, norm: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS) * norm.double()


@pytest.mark.parametrize("num_rows", [1, 5, 17])
@pytest.mark.parametrize("cut", CUTS)
def test_a_product_adds_the_residual(cut: str, num_rows: int) -> None:
    x, weight = normal(num_rows, DEPTH, seed=1), normal(40, DEPTH, seed=2, scale=0.1)
    residual = normal(num_rows, 40, seed=3)
    out = linear.product(x, weight, CUTS[cut], residual=residual)
    expected = residual.double() + F.linear(x.double(), weight.double())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=2**-7)  # the interpreter cuts off, not rounds


@pytest.mark.parametrize("cut", CUTS)
def test_a_norm_goes_before_and_swiglu_after(cut: str) -> None:
    x, norm = normal(3, DEPTH, seed=1, scale=30.0), normal(DEPTH, seed=2)
    gate_up = normal(2 * 24, DEPTH, seed=3, scale=0.1)
    out = linear.product(x, gate_up, CUTS[cut], norm=norm, eps=EPS, swiglu=True)
    gate, up = F.linear(normed(x, norm), gate_up.double()).chunk(2, dim=-1)
    torch.testing.assert_close(out.double(), F.silu(gate) * up, atol=2e-2, rtol=2**-6)


@pytest.mark.parametrize("cut", CUTS)
def test_logits_are_float32_and_not_rounded_to_bf16(cut: str) -> None:
    x, head = normal(2, DEPTH, seed=1), normal(50, DEPTH, seed=3, scale=0.1)
    ones = torch.ones(DEPTH, dtype=torch.bfloat16, device=DEVICE)
    logits = linear.product(x, head, CUTS[cut], norm=ones, eps=EPS, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16()).any()
    torch.testing.assert_close(logits.double(), F.linear(normed(x, ones), head.double()), atol=2e-2, rtol=0)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    x, weight = normal(7, DEPTH, seed=1), normal(40, DEPTH, seed=2)
    together = linear.product(x, weight, CUTS["split"])
    for row in range(7):
        assert torch.equal(linear.product(x[row : row + 1], weight, CUTS["split"])[0], together[row])


def test_counters_of_a_split_are_zero_again_after_it() -> None:
    x, weight = normal(2, DEPTH, seed=1), normal(40, DEPTH, seed=2)
    first = linear.product(x, weight, CUTS["split"])
    assert torch.equal(linear.product(x, weight, CUTS["split"]), first)
    assert not linear._arrivals(x.device).any()


def test_rows_of_zeros_stay_zero_and_outliers_stay_finite() -> None:
    x, norm, weight = normal(3, DEPTH, seed=1), normal(DEPTH, seed=2), normal(40, DEPTH, seed=3)
    x[0] = 0.0
    x[1, 5] = 3e4
    for cut in ("plain", "fused norm"):
        out = linear.product(x, weight, CUTS[cut], norm=norm, eps=EPS)
        assert not out[0].any()
        torch.testing.assert_close(out.double(), F.linear(normed(x, norm), weight.double()), atol=0.2, rtol=2**-6)


def test_the_operators_take_the_tuned_cuts() -> None:
    x, norm, weight = normal(2, 256, seed=1), normal(256, seed=2), normal(64, 256, seed=3, scale=0.1)
    h = normed(x, norm)
    expected = F.linear(h, weight.double())
    gate, up = expected.chunk(2, dim=-1)
    close = {"atol": 5e-2, "rtol": 2**-5}
    torch.testing.assert_close(linear.norm_linear(x, norm, EPS, weight).double(), expected, **close)
    torch.testing.assert_close(linear.norm_logits(x, norm, EPS, weight).double(), expected, **close)
    torch.testing.assert_close(linear.norm_swiglu(x, norm, EPS, weight).double(), F.silu(gate) * up, **close)
    plain = F.linear(x.double(), weight.double())
    torch.testing.assert_close(
        linear.linear_add(x, weight, x[:, :64].contiguous()).double(), plain + x[:, :64].double(), **close
    )


def test_all_row_counts_of_a_class_have_a_cut_and_one_order_of_sums() -> None:
    assert set(CONFIGS) == {(product_class, bucket) for product_class in ProductClass for bucket in ROW_BUCKETS}
    for product_class in ProductClass:
        splits = {config.split_k for (which, rows), config in CONFIGS.items() if which == product_class and rows > 16}
        assert len(splits) == 1


def test_skinny_is_bf16_of_1_to_128_rows() -> None:
    assert linear.is_skinny(1, torch.bfloat16)
    assert linear.is_skinny(128, torch.bfloat16)
    assert not linear.is_skinny(129, torch.bfloat16)
    assert not linear.is_skinny(0, torch.bfloat16)
    assert not linear.is_skinny(1, torch.float32)


@pytest.mark.parametrize(
    ("num_columns", "depth"), [(1024, 256), (256, 640), (2560, 9728), (5120, 25600), (4096, 12288)]
)
def test_a_cut_is_fitted_to_the_shape(num_columns: int, depth: int) -> None:
    for config in (*CONFIGS.values(), ProductConfig(128, 512, split_k=4)):
        fitted = config.fitted(num_columns, depth)
        assert depth % (fitted.split_k * fitted.block_k) == 0
        assert fitted.prefetch_columns <= depth // fitted.split_k
        assert fitted.prefetch_columns % (8 * fitted.prefetch_parts) == 0


@pytest.mark.parametrize("wrong", [{"block_n": 24}, {"block_k": 8}, {"split_k": 0}, {"fused_norm": True, "split_k": 2}])
def test_a_cut_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        ProductConfig(**{"block_n": 32, "block_k": 32, **wrong})
