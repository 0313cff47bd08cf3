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
WARPS = 8
MAX_PIECES, MAX_SHARE, MAX_SEQUENCES = 32, 8, 256
MAX_ROWS = 1 << 16
"""Of a step: the kernel keeps a row's number in 16 bits."""
STEP_TOKENS = 32
ARGUMENTS = (*[POINTER] * 9, ctypes.c_int64, ctypes.c_int64, *[ctypes.c_int] * 4, ctypes.c_float)
COMBINE_ARGUMENTS = (*[POINTER] * 4, *[ctypes.c_int] * 3)


def serves(layout: PageLayout, heads: int, device: torch.device) -> bool:
    """Whether the kernel knows pages of this layout under so many query heads, and this GPU (bulk copies: Hopper)."""
    share = heads // layout.num_kv_heads
    known = layout.kv_dtype == "fp8" and layout.page_tokens == 64 and layout.head_dim == 128 and share <= MAX_SHARE
    return known and is_hopper(device)


def has_room(max_rows: int, max_sequences: int) -> bool:
    """Whether the kernel takes every step of up to so many rows and sequences."""
    return max_rows <= MAX_ROWS and max_sequences <= MAX_SEQUENCES


def least_piece_pages(num_sequences: int) -> int:
    """A context is cut in pieces of this many pages at least (more where they would be over 29), the rest in quarters.

    Few sequences need many pieces to fill the GPU; many need few, since each costs a partial result. Of those that were
    timed on an H200, the fastest with contexts of 2,000 to 2,250 tokens and of 200 to 2,500.
    """
    return 2 if num_sequences <= 4 else 4 if num_sequences <= 16 else 8 if num_sequences <= 32 else 16


def constants_of(share: int) -> dict[str, int]:
    """What the source is compiled with for so many query heads a KV head."""
    return {
        "SHARE": share,
        "STAGES": 3 if share <= 4 else 2,  # what fits beside as many queries
        "TOKENS": STEP_TOKENS,
        "WARPS": WARPS,
        "ADDERS": min(share, 4),
        "MAX_PIECES": MAX_PIECES,
        "MAX_SEQUENCES": MAX_SEQUENCES,
    }


class DecodeAttention:
    """The compiled kernel and its workspace; sequences of more than one row in a step are not its business."""

    def __init__(self, heads: int, kv_heads: int, device: torch.device) -> None:
        """The workspace is 17 KB a sequence and query head, for 256 sequences: 136 MB for 32 heads."""
        share = heads // kv_heads
        constants = constants_of(share)
        ring_bytes = WARPS * constants["STAGES"] * (2 * STEP_TOKENS * (128 + 4) + share * 128 * 2)
        self._kernel = Kernel(SOURCE, "decode_attention", ARGUMENTS, ring_bytes, constants)
        self._combine = Kernel(SOURCE, "combine_pieces", COMBINE_ARGUMENTS, 0, constants)
        self._adders = constants["ADDERS"]
        partial_floats = -(-share * (128 + 2) // 4) * 4
        floats = MAX_SEQUENCES * kv_heads * MAX_PIECES * partial_floats
        self._partials = torch.empty(floats, dtype=torch.float32, device=device)
        self._blocks = torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float, out: Tensor) -> None:
        """q bfloat16 [T, heads, 128]; writes the rows of single-row sequences into `out` [T, heads * 128].

        ValueError beyond 256 sequences.
        """
        if batch.num_sequences > MAX_SEQUENCES:
            raise ValueError(f"at most {MAX_SEQUENCES} sequences, not {batch.num_sequences}")
        assert kv.scales is not None, "FP8 pages have scales"
        piece_pages = least_piece_pages(batch.num_sequences)
        heads, kv_heads = q.shape[1], kv.layout.num_kv_heads
        self._kernel.launch(
            self._blocks,
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
                kv.num_pages,
                batch.block_tables.stride(0),
                batch.num_sequences,
                heads,
                kv_heads,
                piece_pages,
                scale,
            ),
        )
        starts, contexts = batch.query_starts, batch.context_lengths
        self._combine.launch(
            batch.num_sequences * kv_heads,
            self._adders * 32,
            (starts, contexts, self._partials, out, heads, kv_heads, piece_pages),
        )
