"""Rotary positions: on the way of Q, K and V to attention and the pages, and in the vision tower."""

from __future__ import annotations

from math import gcd

import torch
import triton
from torch import Tensor

from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.kernels.rope_store import norm_rope_store, rotate_heads
from prism_server.ops.triton.launch import overlapped

TILE_HEADS = 8
"""Heads of one program at most: 16 bytes a thread with two warps."""


def qk_norm_rope_store(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    kv: PagedKV,
    layer: int,
    batch: AttentionBatch,
) -> Tensor:
    """`Ops.qk_norm_rope_store` in one kernel; qkv is contiguous, head_dim is a power of two.

    Rounds where plain torch does and never contracts a product and a sum, so that equal sums give equal bytes.
    """
    layout = kv.layout
    num_rows, head_dim, kv_heads = qkv.shape[0], layout.head_dim, layout.num_kv_heads
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((num_rows, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    payload, scales = kv.tensors()[0], kv.tensors()[-1]
    tile = gcd(TILE_HEADS, heads, kv_heads)
    cos, sin = cos.contiguous(), sin.contiguous()
    norm_rope_store[num_rows, (heads + 2 * kv_heads) // tile](
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        batch.page_index,
        batch.slot_index,
        q,
        payload,
        scales,
        kv.num_pages,
        layer,
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_TOKENS=layout.page_tokens,
        TILE_HEADS=tile,
        FP8=layout.has_scales,
        num_warps=max(1, tile * head_dim // 512),
        enable_fp_fusion=False,
        **overlapped(qkv.device),
    )
    return q


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x [T, heads, head_dim], of any strides but the last -> contiguous.

    cos, sin float32 [T, head_dim / 2].
    """
    num_rows, heads, head_dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    cos, sin = cos.contiguous(), sin.contiguous()
    if num_rows:
        tile = min(16, triton.next_power_of_2(heads))
        rotate_heads[num_rows, triton.cdiv(heads, tile)](
            x,
            cos,
            sin,
            out,
            x.stride(0),
            x.stride(1),
            HEADS=heads,
            HEAD_DIM=head_dim,
            TILE_HEADS=tile,
            TILE_HALF=triton.next_power_of_2(head_dim // 2),
            num_warps=4,
            enable_fp_fusion=False,
            **overlapped(x.device),
        )
    return out
