"""Full attention inside segments: the vision tower's, one picture or one pair of frames each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from prism_server.ops.interface import SEGMENT_TILE_ROWS
from prism_server.ops.triton.kernels.segments import attend_segments
from prism_server.ops.triton.launch import overlapped

BLOCK_ROWS, BLOCK_KEYS = 64, 64
"""Of four that were timed on an H200: eight frames of 784 patches 133 us, against 154 to 177."""
WIDE_BLOCK = 32
"""Rows and keys of float32 numbers, which take more registers and nobody's time but tests'."""


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """`Ops.segment_attention` by torch's own kernels: segments of one length are one batch."""
    if len(set(lengths)) == 1:
        return _attend(q, k, v, lengths[0], scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for length, rows in _rows_by_length(tuple(lengths), q.device):
        out[rows] = _attend(q[rows], k[rows], v[rows], length, scale)
    return out


def packed_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> Tensor:
    """`Ops.packed_attention` in one kernel, whose grid depends on the size of tiles only."""
    _, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wide = q.dtype == torch.float32
    block_rows, block_keys = (WIDE_BLOCK, WIDE_BLOCK) if wide else (BLOCK_ROWS, BLOCK_KEYS)
    programs = SEGMENT_TILE_ROWS // block_rows
    attend_segments[tiles.shape[0] * programs, heads](
        q,
        k,
        v,
        tiles,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        scale,
        HEADS=heads,
        HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)),
        PROGRAMS=programs,
        BLOCK_ROWS=block_rows,
        BLOCK_KEYS=block_keys,
        num_warps=4,
        num_stages=2 if wide else 3,
        **overlapped(q.device),
    )
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """[n * length, heads, head_dim], n segments, -> that shape."""
    queries, keys, values = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return attended.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=8)  # all blocks of the tower ask for the same
def _rows_by_length(lengths: tuple[int, ...], device: torch.device) -> list[tuple[int, Tensor]]:
    """Each length there is, and int64 rows of its segments, one after the other."""
    starts = defaultdict(list)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        starts[length].append(end - length)
    rows = {
        length: [row for start in found for row in range(start, start + length)] for length, found in starts.items()
    }
    if device.type != "cuda":
        return [(length, torch.tensor(of_length)) for length, of_length in rows.items()]
    # From pinned memory: a plain copy would wait until the device has done all its work.
    return [
        (length, torch.tensor(of_length, pin_memory=True).to(device, non_blocking=True))
        for length, of_length in rows.items()
    ]
