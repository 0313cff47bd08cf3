"""Decode attention: one query row a sequence over FP8 pages, as fast as the memory gives them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from prism_server.capacity.page_layout import PageLayout
from prism_server.ops.cuda.module import POINTER, Kernel
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV

SOURCE = Path(__file__).with_name("decode_attention.cu")
WARPS, STAGES = 4, 3
STAGE_BYTES = 2 * (64 * 128 + 64 * 4)
MAX_PIECES, MAX_SHARE, MAX_SEQUENCES = 32, 8, 256
PARTIAL_FLOATS = MAX_SHARE * (128 + 2)
LEAST_PIECE_PAGES = 4
"""A piece of a context is at least this long: 256 tokens."""
ARGUMENTS = (*[POINTER] * 10, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_int] * 4, ctypes.c_float)


def serves(layout: PageLayout, heads: int) -> bool:
    """Whether the kernel knows pages of this layout under so many query heads."""
    share = heads // layout.num_kv_heads
    return layout.kv_dtype == "fp8" and layout.page_tokens == 64 and layout.head_dim == 128 and share <= MAX_SHARE


class DecodeAttention:
    """The compiled kernel and its workspace; sequences of more than one row in a step are not its business."""

    def __init__(self, max_sequences: int, kv_heads: int, device: torch.device) -> None:
        """ValueError beyond 256 sequences. The workspace is 33 KB a sequence and KV head."""
        if max_sequences > MAX_SEQUENCES:
            raise ValueError(f"at most {MAX_SEQUENCES} sequences, not {max_sequences}")
        self._kernel = Kernel(SOURCE, "decode_attention", ARGUMENTS, WARPS * STAGES * STAGE_BYTES)
        pairs = max_sequences * kv_heads
        self._partials = torch.empty(pairs * MAX_PIECES * PARTIAL_FLOATS, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(pairs, dtype=torch.int32, device=device)
        self._programs = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        out: Tensor,
        piece_pages: int = LEAST_PIECE_PAGES,
    ) -> None:
        """q bfloat16 [T, heads, 128]; writes the rows of single-row sequences of `out` [T, heads * 128]."""
        assert kv.scales is not None, "FP8 pages have scales"
        heads, kv_heads = q.shape[1], kv.layout.num_kv_heads
        self._kernel.launch(
            self._programs,
            WARPS * 32,
            (
                q,
                kv.payload[layer],
                kv.scales[layer],
                batch.query_starts,
                batch.context_lengths,
                batch.block_tables,
                batch.table_rows,
                out,
                self._partials,
                self._arrivals,
                kv.num_pages,
                batch.block_tables.stride(0),
                batch.num_sequences,
                heads,
                kv_heads,
                piece_pages,
                scale,
            ),
        )
