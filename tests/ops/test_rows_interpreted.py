"""Copies of rows and moves of pages, in Triton's interpreter: byte for byte, and nothing else."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

import pytest
import torch

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops import HostPages, PagedKV
from prism_server.ops.triton.rows import copy_rows, move_pages

KV_DTYPES: tuple[KVDtype, ...] = ("fp8", "bf16", "fp32")
NUM_PAGES = 6


def pool_of_noise(kv_dtype: KVDtype) -> PagedKV:
    """Every byte random: NaN and infinities among them. The same ones each time."""
    kv = PagedKV(PageLayout(2, 3, 8, 4, kv_dtype), NUM_PAGES, DEVICE)
    for tensor in kv.tensors():
        raw = tensor.view(torch.uint8)
        noise = torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        raw.copy_(noise)
    return kv


def same(a: PagedKV, b: PagedKV) -> bool:
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_are_copied_as_plain_torch_copies_them(kv_dtype: KVDtype) -> None:
    kv, expected = pool_of_noise(kv_dtype), pool_of_noise(kv_dtype)
    copies = ([0, 1, 0], [3, 4, 5], [1, 4, 0])
    copy_rows(kv, *copies)
    expected.copy_rows(*copies)
    assert same(kv, expected)
    assert not same(kv, pool_of_noise(kv_dtype))


def test_a_plan_without_copies_launches_nothing() -> None:
    kv = pool_of_noise("fp8")
    copy_rows(kv, [], [], [])
    assert same(kv, pool_of_noise("fp8"))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_staged_page_has_the_bytes_of_a_host_page_and_goes_back_to_any_page(kv_dtype: KVDtype) -> None:
    kv, expected = pool_of_noise(kv_dtype), pool_of_noise(kv_dtype)
    host = HostPages(kv.layout, 3)
    pages = [5, 0, 3]
    staging = torch.zeros((4, kv.layout.page_bytes // 4), dtype=torch.int32, device=DEVICE)
    move_pages(kv, pages, staging, to_pool=False)
    host.swap_out(expected, pages, [0, 1, 2])
    begin = 0
    for tensor in host.tensors():
        words = tensor.flatten(1).view(torch.int32)
        assert torch.equal(staging[:3, begin : begin + words.shape[1]].cpu(), words)
        begin += words.shape[1]
    assert begin == staging.shape[1]
    assert not staging[3].any()
    move_pages(kv, [1, 3, 2], staging, to_pool=True)
    host.swap_in(expected, [0, 1, 2], [1, 3, 2])
    assert same(kv, expected)
