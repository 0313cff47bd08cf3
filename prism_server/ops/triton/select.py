"""Choosing tokens: the best of each row, or one at random."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from prism_server.ops.triton.kernels.select import best_ids, coarse_sums, draw_ids, extremes
from prism_server.ops.triton.launch import overlapped

PART_TOKENS = 4096
"""A row is cut into parts of so many tokens, each a program's."""
LISTED_TOKENS = 2048
"""So many tokens are compared in registers; more are first told apart by passes over the row."""
COARSE_THRESHOLDS = 16
MAX_VOCAB = 1 << 20
"""The kernels' order of tokens has so many bits for an id."""


def argmax(logits: Tensor) -> Tensor:
    """`Ops.argmax`, in two launches: logits float32 [R, vocab], contiguous -> int64 [R]."""
    num_rows = logits.shape[0]
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        parts = _extremes(logits, PART_TOKENS)
        best_of_parts(parts, out)
    return out


def best_of_parts(parts: Tensor, out: Tensor) -> None:
    """The id of each row's first place, to out int64 [R]; parts int64 [R, parts, places], a part's first one first."""
    num_rows, num_parts, width = parts.shape
    block = triton.next_power_of_2(num_parts)
    extra = overlapped(parts.device)
    best_ids[(num_rows,)](parts, out, num_parts, WIDTH=width, BLOCK=block, num_warps=1, **extra)


def draw(
    logits: Tensor,
    params: Tensor,
    part_tokens: int = PART_TOKENS,
    listed_tokens: int = LISTED_TOKENS,
    block: int = 2048,
) -> Tensor:
    """`Ops.draw`, in three launches: logits float32 [R, vocab], params float64 [R, 5], contiguous -> int64 [R].

    As plain torch, except where a boundary of top-k, top-p, min-p or the number lies within the rounding of float32
    sums. The same logits and params give the same tokens whatever the other rows are. `part_tokens`, `listed_tokens`
    and `block` are powers of two, smaller ones for tests.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out
    parts = _extremes(logits, part_tokens)
    num_parts, padded = parts.shape[1], triton.next_power_of_2(parts.shape[1])
    thresholds = torch.empty((num_rows, COARSE_THRESHOLDS), dtype=torch.int64, device=device)
    weights = torch.empty((num_rows, num_parts, COARSE_THRESHOLDS), dtype=torch.float32, device=device)
    counts = torch.empty((num_rows, num_parts, COARSE_THRESHOLDS), dtype=torch.int32, device=device)
    coarse_sums[num_rows, num_parts](
        logits,
        params,
        parts,
        thresholds,
        weights,
        counts,
        vocab_size,
        num_parts,
        PARTS=padded,
        WIDTH=COARSE_THRESHOLDS,
        CHUNK=part_tokens,
        BLOCK=min(256, part_tokens),
        num_warps=8,
    )
    draw_ids[(num_rows,)](
        logits,
        params,
        parts,
        thresholds,
        weights,
        counts,
        torch.empty((num_rows, listed_tokens), dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
        out,
        vocab_size,
        num_parts,
        PARTS=padded,
        WIDTH=COARSE_THRESHOLDS,
        FOUND=listed_tokens,
        BLOCK=block,
        COLLECT_BLOCK=4 * block,
        num_warps=16,
    )
    return out


def _extremes(logits: Tensor, part_tokens: int) -> Tensor:
    num_rows, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB or not logits.is_contiguous():
        raise ValueError(f"logits of {vocab_size} tokens, contiguous: {logits.is_contiguous()}; at most {MAX_VOCAB}")
    num_parts = triton.cdiv(vocab_size, part_tokens)
    parts = torch.empty((num_rows, num_parts, 2), dtype=torch.int64, device=logits.device)
    extremes[num_rows, num_parts](
        logits, parts, vocab_size, num_parts, BLOCK=part_tokens, num_warps=8, **overlapped(logits.device)
    )
    return parts
