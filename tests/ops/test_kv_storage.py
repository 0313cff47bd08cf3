"""The page pool: what a stored row is, and that every move of it is byte for byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops import HostPages, PagedKV
from prism_server.ops.kv_storage import dequantise_rows, quantise_rows

KV_DTYPES: tuple[KVDtype, ...] = ("fp8", "bf16", "fp32")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pool_of_noise(kv_dtype: KVDtype, num_pages: int = 6) -> PagedKV:
    """Every byte random: NaN, infinities and subnormal numbers among them."""
    kv = PagedKV(PageLayout(2, 3, 8, 4, kv_dtype), num_pages, "cpu")
    for tensor in kv.tensors():
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, generator=generator(), dtype=torch.uint8))
    return kv


def page_bytes(kv: PagedKV, page: int) -> list[Tensor]:
    """Copies of a page's payload and scales as uint8 [layer, 2, kv_head, slot, bytes]."""
    shape = (*kv.payload.shape[:2], *kv.payload.shape[3:5], -1)
    return [tensor[:, :, page].clone().view(shape).view(torch.uint8) for tensor in kv.tensors()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_pool_and_host_pages_have_the_bytes_that_the_layout_says() -> None:
    for kv_dtype in KV_DTYPES:
        layout = PageLayout(2, 3, 8, 4, kv_dtype)
        kv, host = PagedKV(layout, 5, "cpu"), HostPages(layout, 7)
        assert sum(tensor.nbytes for tensor in kv.tensors()) == kv.num_bytes == 5 * layout.page_bytes
        assert sum(tensor.nbytes for tensor in host.tensors()) == host.num_bytes == 7 * layout.page_bytes


def hard_rows() -> Tensor:
    """Magnitudes from 1e-3 to 1e3, an outlier head, an outlier element, zero rows, rows too small for a scale."""
    rows = torch.randn((64, 3, 128), generator=generator(1))
    rows *= torch.logspace(-3, 3, 64).view(64, 1, 1)
    rows[:, 1] *= 300
    rows[::5, 2, 17] = 1e4
    rows[3] = 0
    rows[4, 0] = 0
    rows[5] *= 1e-12
    return rows


def test_a_quantised_row_is_within_half_of_its_last_place() -> None:
    rows = hard_rows()
    payload, scale = quantise_rows(rows)
    assert torch.isfinite(payload.float()).all()
    assert payload.float().abs().max() <= 448
    back = payload.float() * scale.unsqueeze(-1)
    bound = torch.maximum(rows.abs() * 2**-4, scale.unsqueeze(-1) * 2**-10) * 1.0001
    assert ((back - rows).abs() <= bound).all()
    assert (back[3] == 0).all()
    assert torch.equal(scale[3], torch.full((3,), 2.0**-20 / 448))


def test_each_token_and_head_has_a_scale_of_its_own() -> None:
    rows = hard_rows()
    _, scale = quantise_rows(rows)
    assert torch.equal(scale, rows.abs().amax(-1).clamp(min=2.0**-20) / 448)


def test_dequantisation_gives_every_e4m3_number_exactly() -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers = numbers[(numbers & 0x7F) != 0x7F]  # the two NaN
    scale = torch.tensor([0.37])
    assert torch.equal(dequantise_rows(numbers, scale), numbers.view(torch.float8_e4m3fn).float() * scale)


def test_a_row_that_is_not_finite_stays_so() -> None:
    rows = torch.ones((2, 1, 8))
    rows[0, 0, 3] = float("nan")
    rows[1, 0, 3] = float("inf")
    kv = PagedKV(PageLayout(1, 1, 8, 4, "fp8"), 1, "cpu")
    kv.store(0, rows, rows, torch.tensor([0, 0]), torch.tensor([0, 1]))
    k, _ = kv.read(0, [0], 2)
    assert not torch.isfinite(k).any(dim=-1).any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_are_read_as_they_were_stored(kv_dtype: KVDtype) -> None:
    layout = PageLayout(2, 3, 128, 8, kv_dtype)
    kv = PagedKV(layout, 12, "cpu")
    kv.payload.view(torch.uint8).fill_(0xFF)
    k, v = hard_rows()[:21], hard_rows().flip(0)[:21]
    pages = [7, 2, 10]
    rows = torch.arange(21)
    kv.store(1, k, v, torch.tensor(pages)[rows // 8], rows % 8)
    for stored, given in zip(kv.read(1, pages, 21), (k, v), strict=True):
        if kv_dtype == "fp8":
            payload, scale = quantise_rows(given)
            assert torch.equal(stored, payload.float() * scale.unsqueeze(-1))
        else:
            assert torch.equal(stored, given.to(kv.payload.dtype).float())


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copy_rows_copies_those_rows_and_nothing_else(kv_dtype: KVDtype) -> None:
    kv = pool_of_noise(kv_dtype)
    before = [page_bytes(kv, page) for page in range(6)]
    kv.copy_rows([0, 1, 2], [3, 4, 5], [1, 4, 0])
    assert same(page_bytes(kv, 4), before[1])
    for page in (0, 1, 2, 5):
        assert same(page_bytes(kv, page), before[page])
    for now, source, old in zip(page_bytes(kv, 3), before[0], before[3], strict=True):
        assert torch.equal(now[:, :, :, :1], source[:, :, :, :1])
        assert torch.equal(now[:, :, :, 1:], old[:, :, :, 1:])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_page_comes_back_from_the_host_byte_for_byte(kv_dtype: KVDtype) -> None:
    kv = pool_of_noise(kv_dtype)
    host = HostPages(kv.layout, 4)
    before = [page_bytes(kv, page) for page in range(6)]
    host.swap_out(kv, [5, 0, 3], [2, 3, 0])
    for tensor in kv.tensors():
        tensor.view(torch.uint8)[:, :, [0, 3]] = 0
    host.swap_in(kv, [3, 2, 0], [1, 4, 3])
    assert same(page_bytes(kv, 1), before[0])
    assert same(page_bytes(kv, 4), before[5])
    assert same(page_bytes(kv, 3), before[3])
    assert same(page_bytes(kv, 2), before[2])
    assert not any(part.any() for part in page_bytes(kv, 0))


def test_store_gather_copy_and_swap_are_byte_exact_in_a_pool_beyond_two_to_the_31_elements() -> None:
    """Memory is only reserved; the few pages that are touched lie where a 32-bit offset would have wrapped."""
    layout = PageLayout(1, 1, 128, 64, "fp8")
    num_pages = 2**31 // (64 * 128) // 2 + 64  # K alone reaches 2^30 elements, V lies beyond 2^31
    kv = PagedKV(layout, num_pages, "cpu")
    assert kv.payload.numel() > 2**31
    far, near = num_pages - 1, num_pages - 1 - 2**31 // (64 * 128) // 2 + 1
    for page in (far, near, far - 1):
        for tensor in kv.tensors():
            tensor[:, :, page].view(torch.uint8).fill_(0)
    k = torch.randn((64, 1, 128), generator=generator(2))
    v = torch.randn((64, 1, 128), generator=generator(3))
    kv.store(0, k, v, torch.full((64,), far), torch.arange(64))
    for stored, given in zip(kv.read(0, [far], 64), (k, v), strict=True):
        payload, scale = quantise_rows(given)
        assert torch.equal(stored, payload.float() * scale.unsqueeze(-1))
    assert not any(part.any() for part in page_bytes(kv, near))
    kv.copy_rows([far], [far - 1], [64])
    assert same(page_bytes(kv, far - 1), page_bytes(kv, far))
    host = HostPages(layout, 1)
    host.swap_out(kv, [far], [0])
    host.swap_in(kv, [0], [near])
    assert same(page_bytes(kv, near), page_bytes(kv, far))
