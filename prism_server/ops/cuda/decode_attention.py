"""Decode attention: one query row a sequence over FP8 pages, as fast as the memory gives them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from prism_server.capacity.page_layout import PageLayout
from prism_server.ops.capability import is_hopper
from prism_server.ops.cuda.module import POINTER, Kernel
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV

SOURCE = Path(__file__).with_name("decode_attention.cu")
COMBINE_SOURCE = Path(__file__).with_name("combine_parts.cu")
WARPS, STAGES = 4, 3
MAX_SHARE, MAX_SEQUENCES = 8, 256
STAGE_BYTES = 2 * (64 * 128 + 64 * 4) + MAX_SHARE * 128 * 2
SLOTS = 37
ARGUMENTS = (*[POINTER] * 10, *[ctypes.c_int64] * 3, *[ctypes.c_int] * 5, ctypes.c_float)
COMBINE_ARGUMENTS = (*[POINTER] * 4, *[ctypes.c_int] * 5)
MAX_AHEAD_BYTES = 40 << 20
"""Of the weights that come next: the L2 of a Hopper GPU holds 50 MB."""


def serves(layout: PageLayout, heads: int, device: torch.device) -> bool:
    """Whether the kernel knows pages of this layout under so many query heads, and this GPU (bulk copies: Hopper)."""
    share = heads // layout.num_kv_heads
    known = layout.kv_dtype == "fp8" and layout.page_tokens == 64 and layout.head_dim == 128 and share <= MAX_SHARE
    return known and is_hopper(device)


def part_pages(num_sequences: int) -> int:
    """Pages that are added up by themselves, at least: the finer, the more equal the work of the warps, and the more
    there is left to combine."""
    return 1 if num_sequences <= 16 else 2


def ahead_pace(num_sequences: int) -> int:
    """Clocks from one request of a multiprocessor for 4 KB of the coming weights to the next: as many as the pages
    leave room for."""
    return 300 if num_sequences <= 4 else 450 if num_sequences <= 16 else 1000


class DecodeAttention:
    """The compiled kernel and its workspace; sequences of more than one row in a step are not its business."""

    def __init__(self, heads: int, kv_heads: int, device: torch.device) -> None:
        """The workspace is 19 KB a warp and query head that shares a KV head: 41 MB of an H200 with four."""
        self._kernel = Kernel(SOURCE, "decode_attention", ARGUMENTS, WARPS * STAGES * STAGE_BYTES)
        self._combine = Kernel(COMBINE_SOURCE, "combine_parts", COMBINE_ARGUMENTS, 0)
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count
        result_floats = -(-(heads // kv_heads) * (128 + 2) // 4) * 4
        floats = self._blocks * WARPS * SLOTS * result_floats
        self._left = torch.empty(floats, dtype=torch.float32, device=device)

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        out: Tensor,
        ahead: Tensor | None = None,
    ) -> None:
        """q bfloat16 [T, heads, 128]; writes the rows of single-row sequences into `out` [T, heads * 128].

        `ahead`: what the next kernel reads is asked into the L2 meanwhile. ValueError beyond 256 sequences.
        """
        if batch.num_sequences > MAX_SEQUENCES:
            raise ValueError(f"at most {MAX_SEQUENCES} sequences, not {batch.num_sequences}")
        assert kv.scales is not None, "FP8 pages have scales"
        least = part_pages(batch.num_sequences)
        heads, kv_heads = q.shape[1], kv.layout.num_kv_heads
        self._kernel.launch(
            self._blocks,
            (WARPS + 1) * 32,
            (
                q,
                kv.payload[layer],
                kv.scales[layer],
                batch.query_starts,
                batch.context_lengths,
                batch.block_tables,
                batch.table_rows,
                out,
                self._left,
                q if ahead is None else ahead,
                0 if ahead is None else min(ahead.nbytes, MAX_AHEAD_BYTES),
                kv.num_pages,
                batch.block_tables.stride(0),
                batch.num_sequences,
                heads,
                kv_heads,
                least,
                ahead_pace(batch.num_sequences),
                scale,
            ),
        )
        starts, contexts, workers = batch.query_starts, batch.context_lengths, self._blocks * WARPS
        self._combine.launch(
            batch.num_sequences * kv_heads,
            WARPS * 32,
            (starts, contexts, self._left, out, batch.num_sequences, heads, kv_heads, least, workers),
        )
