"""Copies inside the page pool, and between it and a staging area: one launch each, nothing waits for the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.kernels import rows as kernels

WORD_BYTES = 4
MOVE_BLOCK = 2048


def copy_rows(kv: PagedKV, sources: Sequence[int], targets: Sequence[int], rows: Sequence[int]) -> None:
    """`Ops.copy_rows`: all copies of a plan, all layers, payload and scales, in one launch."""
    if not sources:
        return
    layout = kv.layout
    payload, scales = _words(kv)
    row_words = payload.shape[-1]
    copies = small_ints([number for copy in zip(sources, targets, rows, strict=True) for number in copy], kv.device)
    kernels.copy_rows[len(sources), layout.num_layers * 2 * layout.num_kv_heads](
        payload,
        payload if scales is None else scales,
        copies,
        kv.num_pages,
        KV_HEADS=layout.num_kv_heads,
        PAGE_TOKENS=layout.page_tokens,
        ROW_WORDS=row_words,
        SCALES=scales is not None,
        BLOCK=triton.next_power_of_2(layout.page_tokens * row_words),
        SCALE_BLOCK=triton.next_power_of_2(layout.page_tokens),
        num_warps=4,
    )


def move_pages(kv: PagedKV, pages: Sequence[int], staging: Tensor, *, to_pool: bool) -> None:
    """Page pages[i] to or from staging[i]: int32 [>= n, page_bytes / 4], payload then scales, as a page of the host.

    On the current stream; two launches with FP8, else one.
    """
    index = small_ints(pages, kv.device)
    num_planes = kv.layout.num_layers * 2
    begin = 0
    for words in _words(kv):
        if words is None:
            continue
        page_words = words[0, 0, 0].numel()
        kernels.move_pages[len(pages), num_planes](
            words,
            staging[:, begin:],
            index,
            kv.num_pages,
            page_words,
            staging.stride(0),
            TO_POOL=to_pool,
            BLOCK=min(MOVE_BLOCK, triton.next_power_of_2(page_words)),
            num_warps=4,
        )
        begin += num_planes * page_words


def small_ints(numbers: Sequence[int], device: torch.device) -> Tensor:
    """int32 [n] on `device`, by one copy in stream order; the host does not wait for it."""
    on_host = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _words(kv: PagedKV) -> tuple[Tensor, Tensor | None]:
    """Payload [layer, 2, page, kv_head, slot, words] and scales as int32."""
    payload, *scales = (tensor.view(torch.int32) for tensor in kv.tensors())
    return payload, scales[0] if scales else None
