"""The likeliest token of up to 128 rows by an FP8 copy of the head, ranked again by the head itself: four launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prism_server.ops.capability import capability, has_tma
from prism_server.ops.fp8_head import NUM_CANDIDATES, Fp8Head
from prism_server.ops.triton.kernels.candidates import best_of_groups, best_of_tiles, norm_rows_for_candidates
from prism_server.ops.triton.launch import overlapped
from prism_server.ops.triton.linear_configs import ProductConfig, rows_bucket
from prism_server.ops.triton.select import MAX_VOCAB, best_of_parts

KEPT = 4
"""Tokens of each tile, and of each group of tiles, that stay candidates: the best one is missed only if so many others
of a group look better by the copy."""
GROUPS = NUM_CANDIDATES // KEPT
"""A row's groups are ranked by programs of their own."""
NATIVE_E4M3 = (8, 9)
"""The first GPUs that convert E4M3 numbers themselves."""
RANK_SLOTS, RANK_COLUMNS, RANK_BLOCK_K = 64, 16, 256
"""The least tile of a warp group's tensor cores: a logit is added up in the order of the head's own product."""

CONFIGS: dict[int, ProductConfig] = {
    16: ProductConfig(64, 128, num_stages=3, prefetch_columns=0),
    32: ProductConfig(64, 128, prefetch_columns=0),
    64: ProductConfig(128, 64, num_warps=8, num_stages=3, tma=False, prefetch_columns=0),
    128: ProductConfig(256, 64, num_warps=8, num_stages=3, prefetch_columns=0),
}
"""By row bucket; `block_k` counts pairs of inputs. Up to 32 rows the fastest of five, measured on an H200 with the head
of an 8B; the others are those of the full head, with less traffic for its rows, each measured alone."""


def norm_best(
    x: Tensor, norm: Tensor, eps: float, head: Fp8Head, config: ProductConfig | None = None, groups: int = GROUPS
) -> Tensor:
    """`Ops.norm_best`: 1 to 128 rows of bf16 x [R, in], contiguous -> int64 [R].

    `config` cuts the product with the copy, and `groups` the vocabulary, in another way: for tests and measurements.
    """
    (num_rows, depth), vocab_size, device = x.shape, head.vocab_size, x.device
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab_size} tokens; at most {MAX_VOCAB}")
    normed, halves = _normed(x, norm, eps)
    bucket, num_pairs = rows_bucket(num_rows), depth // 2
    config = (config or CONFIGS[bucket]).fitted(vocab_size, num_pairs)
    tiles, extra = triton.cdiv(vocab_size, config.block_n), overlapped(device)
    tma = config.tma and has_tma(device)
    keys = torch.empty((num_rows, tiles, KEPT), dtype=torch.int32, device=device)
    best_of_tiles[(tiles,)](
        halves,
        head.pairs,
        TensorDescriptor.from_tensor(head.pairs, [config.block_n, config.block_k]) if tma else head.pairs,
        head.scales,
        keys,
        num_rows,
        vocab_size,
        num_pairs,
        ROWS=bucket,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        KEPT=KEPT,
        TMA=tma,
        NATIVE=capability(device) >= NATIVE_E4M3,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **extra,
    )
    group_tiles = triton.cdiv(tiles, groups)
    parts = torch.empty((num_rows, groups, 1), dtype=torch.int64, device=device)
    best_of_groups[num_rows, groups](
        keys,
        normed,
        head.weight,
        parts,
        tiles,
        group_tiles,
        vocab_size,
        depth,
        KEPT=KEPT,
        BLOCK_N=config.block_n,
        BLOCK=triton.next_power_of_2(group_tiles * KEPT),
        SLOTS=RANK_SLOTS,
        COLUMNS=RANK_COLUMNS,
        BLOCK_K=_dividing(depth, RANK_BLOCK_K),
        WIDE=not x.is_cuda,
        num_warps=4,
        num_stages=3,
        **extra,
    )
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    best_of_parts(parts, out)
    return out


def _normed(x: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Rows over their root mean square, times norm; and the same in float16, times a factor for each row."""
    num_rows, depth = x.shape
    normed, halves = torch.empty_like(x), torch.empty_like(x, dtype=torch.float16)
    block = triton.next_power_of_2(depth)
    warps = min(16, max(1, block // 256))
    norm_rows_for_candidates[(num_rows,)](
        x, norm, normed, halves, depth, eps, BLOCK=block, num_warps=warps, **overlapped(x.device)
    )
    return normed, halves


def _dividing(depth: int, block: int) -> int:
    while depth % block:
        block //= 2
    return block
