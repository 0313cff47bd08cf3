"""The page pool's tensors: storing rows, reading them back, copying them, and taking whole pages out and in.

Payload `[layer, 2, page, kv_head, slot, head_dim]` (second axis: K, V); FP8 pages have an FP32 scale per token and
head in `[layer, 2, page, kv_head, slot]`. Every move is byte for byte: whatever bits a row holds, its copy holds.
Slots that no one has written hold anything, NaN included; readers must mask by row count, never by value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype, PageLayout

TORCH_DTYPES: dict[KVDtype, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
E4M3_MAX = 448.0
MIN_ABSMAX = 2.0**-20
"""A row of zeros gets this absmax, so that its scale is finite both ways."""


def quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3FN rows and the FP32 scale of each: `rows` [..., head_dim] -> [..., head_dim], [...].

    A row is `payload * scale`, `scale = max(absmax, 2^-20) / 448`; the payload is off by at most half its last place:
    2^-4 of the value, or 2^-10 of the scale below E4M3's smallest normal number.
    """
    rows = rows.float()
    absmax = rows.abs().amax(dim=-1).clamp(min=MIN_ABSMAX)
    scale = absmax / absmax.new_full((), E4M3_MAX)  # by a host number, CUDA would multiply with its reciprocal
    return (rows / scale.unsqueeze(-1)).to(torch.float8_e4m3fn), scale


def dequantise_rows(payload: Tensor, scales: Tensor) -> Tensor:
    """E4M3FN bytes uint8 [..., head_dim] times scales float32 [..., 1] -> float32; only the product is rounded.

    An E4M3 number's bits, sign apart, are a half-precision number's upper ones: shifted by seven they mean 2^-8 of it,
    subnormal numbers included. On a CPU that is four times as fast as torch's own conversion. A payload of NaN would
    not survive it; but the scale of such a row is NaN already.
    """
    bits = payload.view(torch.int8).to(torch.int16)  # the sign in the upper nine bits
    bits <<= 7
    bits &= -16512  # 0b1011_1111_1000_0000: the sign once
    return bits.view(torch.float16).float().mul_(scales * 256.0)


class PagedKV:
    """The device's page pool. Called by the thread that owns the device; nothing here is locked."""

    def __init__(self, layout: PageLayout, num_pages: int, device: torch.device | str) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.payload = torch.empty(layout.payload_shape(num_pages), dtype=TORCH_DTYPES[layout.kv_dtype], device=device)
        self.scales: Tensor | None = None
        if layout.has_scales:
            self.scales = torch.empty(layout.scale_shape(num_pages), dtype=torch.float32, device=device)
        # Indexing kernels do not know FP8 everywhere; a byte view moves the same bits.
        self._raw = self.payload.view(torch.uint8) if layout.has_scales else self.payload

    @property
    def device(self) -> torch.device:
        return self.payload.device

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes

    def tensors(self) -> tuple[Tensor, ...]:
        """What a page consists of, page on axis 2 of each: payload (FP8 as bytes) and, for FP8, scales."""
        return (self._raw,) if self.scales is None else (self._raw, self.scales)

    @torch.inference_mode()
    def store(self, layer: int, k: Tensor, v: Tensor, page_index: Tensor, slot_index: Tensor) -> None:
        """Write rows: k, v [T, kv_head, head_dim] of any float type; page_index, slot_index int64 [T]."""
        for side, rows in enumerate((k, v)):
            if self.scales is None:
                self._raw[layer, side][page_index, :, slot_index] = rows.to(self._raw.dtype)
                continue
            payload, scale = quantise_rows(rows)
            self._raw[layer, side][page_index, :, slot_index] = payload.view(torch.uint8)
            self.scales[layer, side][page_index, :, slot_index] = scale

    @torch.inference_mode()
    def read(self, layer: int, pages: Sequence[int], num_rows: int) -> tuple[Tensor, Tensor]:
        """The first `num_rows` rows that `pages` hold, as stored: k, v float32 [num_rows, kv_head, head_dim]."""
        table = torch.tensor([list(pages)], dtype=torch.int64, device=self.device)
        filled = num_rows - (len(pages) - 1) * self.layout.page_tokens
        k, v = (
            self.gather(layer, side, table, torch.tensor([filled], device=self.device))[0, :, :num_rows].transpose(0, 1)
            for side in (0, 1)
        )
        return k, v

    def gather(self, layer: int, side: int, tables: Tensor, filled: Tensor) -> Tensor:
        """Dequantised rows of several sequences: float32 [S, kv_head, num_pages * page_tokens, head_dim].

        `side` 0 is K, 1 is V; `tables` int64 [S, num_pages]; of the last page of each sequence only the first
        `filled` [S] slots are its own: the others become zero, so that what lies there (NaN too) cannot spread.
        """
        heads, slots, head_dim = self.payload.shape[3:]
        device = tables.device
        # Runs of one page's head, in the order [sequence, head, page], so that nothing is transposed afterwards.
        runs = tables.unsqueeze(1) * heads + torch.arange(heads, device=device).view(1, heads, 1)
        foreign = (torch.arange(slots, device=device) >= filled.unsqueeze(1)).unsqueeze(1)  # [S, 1, slot]

        def take(pool: Tensor, width: int) -> Tensor:
            found = pool[layer, side].view(-1, slots * width).index_select(0, runs.flatten())
            found = found.view(*runs.shape, slots, width)
            found[:, :, -1].masked_fill_(foreign.unsqueeze(3), 0)
            return found.flatten(2, 3)

        raw = take(self._raw, head_dim)
        return raw.float() if self.scales is None else dequantise_rows(raw, take(self.scales, 1))

    @torch.inference_mode()
    def copy_rows(self, src_pages: Sequence[int], dst_pages: Sequence[int], rows: Sequence[int]) -> None:
        """Copy rows [0, rows[i]) of page src_pages[i] to page dst_pages[i]: all layers, payload and scales.

        No destination may be another copy's source or destination (the plan's rule): the order is not promised.
        """
        for src, dst, num_rows in zip(src_pages, dst_pages, rows, strict=True):
            for tensor in self.tensors():
                tensor[:, :, dst, :, :num_rows] = tensor[:, :, src, :, :num_rows]

    @torch.inference_mode()
    def gather_pages(self, pages: Sequence[int]) -> tuple[Tensor, ...]:
        """Whole pages, page first: payload (FP8 as bytes) [n, layer, 2, kv_head, slot, head_dim], then scales."""
        index = torch.tensor(list(pages), dtype=torch.int64, device=self.device)
        return tuple(tensor.index_select(2, index).movedim(2, 0) for tensor in self.tensors())

    @torch.inference_mode()
    def scatter_pages(self, pages: Sequence[int], content: Sequence[Tensor]) -> None:
        """The inverse of `gather_pages`; `content` may lie on the host."""
        index = torch.tensor(list(pages), dtype=torch.int64, device=self.device)
        for tensor, part in zip(self.tensors(), content, strict=True):
            tensor.index_copy_(2, index, part.to(self.device).movedim(0, 2))
