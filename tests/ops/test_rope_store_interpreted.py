"""Norm, rotation and store in one kernel, in Triton's interpreter: the bytes in the pages, and what attention gets."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

import dataclasses

import pytest
import torch
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops import AttentionBatch, PagedKV
from prism_server.ops.kv_storage import quantise_rows
from prism_server.ops.torch_ops import TorchOps
from prism_server.ops.torch_ops import swiglu as plain_swiglu
from prism_server.ops.triton.rope_store import qk_norm_rope_store, rotate
from prism_server.ops.triton.swiglu import swiglu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity, in NumPy
KV_DTYPES: tuple[KVDtype, ...] = ("fp8", "bf16", "fp32")
EPS = 1e-6
BF16_STEP = 2**-4
"""Of numbers up to three: the interpreter cuts bfloat16 off instead of rounding it, three times on the way of K."""
HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS, NUM_ROWS = 4, 2, 16, 16, 5


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def angles(num_rows: int, half: int) -> tuple[Tensor, Tensor]:
    angle = normal(num_rows, half, seed=4) * 3
    return angle.cos(), angle.sin()


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """qkv whose rows differ in size by six orders, and the weights of the norms."""
    qkv = normal(NUM_ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM, seed=1)
    qkv *= torch.logspace(-3, 3, NUM_ROWS, device=DEVICE).unsqueeze(1)
    norms = 1 + 0.2 * normal(2, HEAD_DIM, seed=2)
    return qkv.to(dtype), norms[0].to(dtype), norms[1].to(dtype)


def pool(kv_dtype: KVDtype) -> PagedKV:
    """Three pages of two layers, every byte 0xFF."""
    kv = PagedKV(PageLayout(2, KV_HEADS, HEAD_DIM, PAGE_TOKENS, kv_dtype), 3, DEVICE)
    for tensor in kv.tensors():
        tensor.view(torch.uint8).fill_(0xFF)
    return kv


def batch(pages: list[int]) -> AttentionBatch:
    """One sequence whose rows lie in these pages, from the middle of one on."""
    pages_, slots = torch.tensor(pages, device=DEVICE), torch.arange(7, 7 + len(pages), device=DEVICE)
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
    exact = AttentionBatch.exact((0, len(pages)), (len(pages),), table, table[0, 1:2], pages_.abs(), slots)
    return dataclasses.replace(exact, page_index=pages_)


def run(dtype: torch.dtype, kv: PagedKV, where: AttentionBatch, layer: int = 1) -> Tensor:
    qkv, q_norm, k_norm = inputs(dtype)
    cos, sin = angles(NUM_ROWS, HEAD_DIM // 2)
    return qk_norm_rope_store(qkv, q_norm, k_norm, EPS, cos, sin, kv, layer, where)


def everything(kv: PagedKV) -> list[Tensor]:
    """uint8 [layer, 2, page, kv_head, slot, bytes] of payload and scales."""
    slots = kv.payload.shape[:-1]
    return [tensor.clone().view(*slots, -1).view(torch.uint8) for tensor in kv.tensors()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_queries_and_stored_rows_are_those_of_plain_torch(dtype: torch.dtype, kv_dtype: KVDtype) -> None:
    kv, expected_kv, where = pool(kv_dtype), pool(kv_dtype), batch([2, 0, 2, 1, 0])
    q = run(dtype, kv, where)
    qkv, q_norm, k_norm = inputs(dtype)
    cos, sin = angles(NUM_ROWS, HEAD_DIM // 2)
    expected = TorchOps().qk_norm_rope_store(qkv, q_norm, k_norm, EPS, cos, sin, expected_kv, 1, where)
    step = 2e-6 if dtype == torch.float32 else BF16_STEP
    torch.testing.assert_close(q, expected, rtol=step, atol=step)
    step = max(step, {"fp8": 2**-3, "bf16": 2**-7, "fp32": 0.0}[kv_dtype])
    for side in (0, 1):
        for slot, page in zip(where.slot_index.tolist(), where.page_index.tolist(), strict=True):
            got, wanted = (
                pool_.payload[1, side, page, :, slot].float()
                * (1.0 if pool_.scales is None else pool_.scales[1, side, page, :, slot].unsqueeze(-1))
                for pool_ in (kv, expected_kv)
            )
            torch.testing.assert_close(got, wanted, rtol=step, atol=step * float(wanted.abs().max()))


def test_quantised_rows_are_the_quantisation_of_exactly_what_full_precision_pages_hold() -> None:
    exact, kv, where = pool("fp32"), pool("fp8"), batch([2, 0, 2, 1, 0])
    run(torch.bfloat16, exact, where)
    run(torch.bfloat16, kv, where)
    assert kv.scales is not None
    for slot, page in zip(where.slot_index.tolist(), where.page_index.tolist(), strict=True):
        payload, scales = quantise_rows(exact.payload[1, :, page, :, slot])
        assert torch.equal(kv.scales[1, :, page, :, slot], scales)
        assert torch.equal(kv.payload.view(torch.uint8)[1, :, page, :, slot], payload.view(torch.uint8))


def test_values_of_every_size_are_quantised_to_the_same_bytes_as_plain_torch() -> None:
    """V goes through no arithmetic but this; zero rows, subnormal numbers, NaN and infinity among its rows."""
    sizes = torch.tensor([1e-30, 1e-6, 1.0, 1e4, 1e30], device=DEVICE)
    qkv, q_norm, k_norm = inputs(torch.float32)
    v = qkv.view(NUM_ROWS, -1, HEAD_DIM)[:, -KV_HEADS:]
    v[:] = normal(*v.shape, seed=5) * 4.0 ** torch.arange(HEAD_DIM, device=DEVICE).neg() * sizes.view(-1, 1, 1)
    v[2, 0] = 0.0
    v[3, 1, 5] = float("nan")
    v[4, 0, 6] = float("-inf")
    kv, expected, where = pool("fp8"), pool("fp8"), batch([0, 1, 2, 0, 1])
    cos, sin = angles(NUM_ROWS, HEAD_DIM // 2)
    qk_norm_rope_store(qkv, q_norm, k_norm, EPS, cos, sin, kv, 0, where)
    expected.store(0, v, v, where.page_index, where.slot_index)
    assert kv.scales is not None
    assert expected.scales is not None
    scales, wanted = kv.scales[0, 1], expected.scales[0, 1]
    assert torch.equal(scales.isnan(), wanted.isnan())
    assert torch.equal(scales.nan_to_num(), wanted.nan_to_num())
    finite = scales.isfinite()  # a row of NaN scale is NaN, whatever its payload
    payloads = (pool_.payload.view(torch.uint8)[0, 1][finite] for pool_ in (kv, expected))
    assert torch.equal(*payloads)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_of_no_page_are_not_stored_and_nothing_else_is_touched(kv_dtype: KVDtype) -> None:
    kv, padded = pool(kv_dtype), pool(kv_dtype)
    q = run(torch.float32, kv, batch([2, 0, 2, 1, 0]))
    q_padded = run(torch.float32, padded, batch([2, 0, 2, -1, -1]))
    assert torch.equal(q_padded, q)
    for got, full in zip(everything(padded), everything(kv), strict=True):
        assert torch.equal(got[1, :, 2], full[1, :, 2])
        assert (got[1, :, 1] == 0xFF).all()
        assert (got[0] == 0xFF).all()
        assert torch.equal(got[1, :, 0, :, :9], full[1, :, 0, :, :9])  # slots 7 and 8 are of rows 0 and 1
        assert (got[1, :, 0, :, 9:] == 0xFF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 72), (2, 16)])
def test_rotation_of_strided_heads_of_any_size_is_that_of_plain_torch(
    dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    x = normal(4, 3 * heads, head_dim, seed=3).to(dtype)[:, heads : 2 * heads]
    cos, sin = angles(4, head_dim // 2)
    got = rotate(x, cos.t().contiguous().t(), sin)
    assert got.is_contiguous()
    torch.testing.assert_close(got, TorchOps().rotate(x, cos, sin), rtol=0, atol=1e-6 if x.itemsize == 4 else 2**-6)


@pytest.mark.parametrize("width", [5, 40])
def test_swiglu_is_silu_of_gate_times_up(width: int) -> None:
    gate_up = normal(3, 2 * width, seed=6) * 4
    torch.testing.assert_close(swiglu(gate_up), plain_swiglu(gate_up))
