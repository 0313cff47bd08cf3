"""The operators of NVIDIA GPUs: Triton's kernels where they win, torch's own products where these are large."""

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor
from torch.nn import functional as F

from prism_server.ops.fp8_head import MAX_FASTER_ROWS, Fp8Head
from prism_server.ops.interface import AttentionBatch, Ops
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton import candidates, linear, rope_store, segments, select
from prism_server.ops.triton.attention import PagedAttention
from prism_server.ops.triton.rows import copy_rows
from prism_server.ops.triton.swiglu import swiglu


class TritonOps(Ops):
    """Products of up to 128 rows are bound by the weights' bytes, and fused; larger ones are cuBLAS's.

    After `reserve`, a step of no more than that allocates nothing of its own: what its kernels share lies in the
    attention's workspace, whose addresses stay.
    """

    name = "triton"
    supports_graphs = True

    def __init__(self) -> None:
        self._reserved: tuple[int, int] | None = None
        self._attention: dict[tuple[int, int, int], PagedAttention] = {}
        self._room = (0, 0)  # rows and sequences, of those above

    def reserve(self, max_rows: int, max_sequences: int, max_context_tokens: int) -> None:
        self._reserved = (max_rows, max_sequences)
        self._attention.clear()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if linear.is_skinny(x.shape[0], x.dtype):
            return linear.norm_linear(x, norm, eps, weight)
        return F.linear(linear.rms_norm(x, norm, eps), weight)

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        if linear.is_skinny(x.shape[0], x.dtype):
            return linear.norm_swiglu(x, norm, eps, gate_up)
        return swiglu(F.linear(linear.rms_norm(x, norm, eps), gate_up))

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        if linear.is_skinny(x.shape[0], x.dtype):
            return linear.linear_add(x, weight, residual)
        return residual.addmm_(x, weight.t())  # in place: the copy that would be made first costs a pass over it

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, head: Tensor) -> Tensor:
        if linear.is_skinny(x.shape[0], x.dtype):
            return linear.norm_logits(x, norm, eps, head)
        return F.linear(linear.rms_norm(x, norm, eps), head).float()

    def argmax(self, logits: Tensor) -> Tensor:
        return select.argmax(logits)

    def norm_best(self, x: Tensor, norm: Tensor, eps: float, head: Fp8Head) -> Tensor:
        if linear.is_skinny(x.shape[0], x.dtype) and x.shape[0] <= MAX_FASTER_ROWS:
            return candidates.norm_best(x, norm, eps, head)
        return self.argmax(self.norm_logits(x, norm, eps, head.weight))

    def draw(self, logits: Tensor, params: Tensor) -> Tensor:
        return select.draw(logits, params)

    def copy_rows(self, kv: PagedKV, sources: Sequence[int], targets: Sequence[int], rows: Sequence[int]) -> None:
        copy_rows(kv, sources, targets, rows)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rope_store.rotate(x, cos, sin)

    def qk_norm_rope_store(
        self,
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
        return rope_store.qk_norm_rope_store(qkv, q_norm, k_norm, eps, cos, sin, kv, layer, batch)

    def paged_attention(self, q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        return self._attention_for(q, kv, batch)(q, kv, layer, batch, scale)

    def segment_attention(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
        return segments.segment_attention(q, k, v, lengths, scale)

    def packed_attention(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> Tensor:
        return segments.packed_attention(q, k, v, tiles, scale)

    def _attention_for(self, q: Tensor, kv: PagedKV, batch: AttentionBatch) -> PagedAttention:
        """With the reserved workspace; without a reserve, with one that has grown to what has been asked for."""
        rows_needed, sequences_needed = q.shape[0], batch.num_sequences
        if self._reserved is None and (rows_needed > self._room[0] or sequences_needed > self._room[1]):
            self._attention.clear()
            self._room = (
                triton.next_power_of_2(max(rows_needed, self._room[0])),
                triton.next_power_of_2(max(sequences_needed, self._room[1])),
            )
        shape = (q.shape[1], kv.layout.num_kv_heads, kv.layout.head_dim)
        attention = self._attention.get(shape)
        if attention is None:
            attention = self._attention[shape] = PagedAttention()
            attention.reserve(*(self._reserved or self._room), *shape, q.device)
        return attention
