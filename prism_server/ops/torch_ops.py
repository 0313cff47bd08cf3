"""Operators in plain torch: the CPU's implementation, and the oracle of every other backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.ops.interface import AttentionBatch, Ops
from prism_server.ops.kv_storage import PagedKV

MAX_GROUP_ROWS = 1 << 12
"""KV rows that a group gathers at once: dequantised copies that a CPU's caches still hold are read twice as fast."""
QUERY_BLOCK_ROWS = 512
"""Query rows that are scored at once: bounds the mask of a long prefill, and skips most of what is masked."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with as many rows and as many pages as each other: they stack with less than a page of padding."""

    query_len: int
    rows: Tensor  # int64 [n * query_len], where they are in the step
    tables: Tensor  # int64 [n, num_pages]
    contexts: Tensor  # int64 [n]
    filled: Tensor  # int64 [n], slots in use of the last page
    max_context: int


class TorchOps(Ops):
    """Stateless but for the last batch's grouping, which all layers of a step share."""

    name = "torch"

    def __init__(self) -> None:
        self._grouped: tuple[AttentionBatch, int, list[_Group]] | None = None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

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
        head_dim, kv_heads = kv.layout.head_dim, kv.layout.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q, k, v = heads.tensor_split((heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads), dim=1)
        q = self.rotate(self.rms_norm(q, q_norm, eps), cos, sin)
        k = self.rotate(self.rms_norm(k, k_norm, eps), cos, sin)
        kv.store(layer, k, v, batch.page_index, batch.slot_index)
        return q

    def paged_attention(self, q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        num_rows, heads, head_dim = q.shape
        out = torch.empty((num_rows, heads * head_dim), dtype=q.dtype, device=q.device)
        for group in self._groups(batch, kv.layout.page_tokens):
            k, v = (kv.gather(layer, side, group.tables, group.filled) for side in (0, 1))
            queries = q[group.rows].float().view(-1, group.query_len, heads, head_dim)
            attended = _causal(queries, k, v, group, scale)
            out[group.rows] = attended.flatten(2, 3).flatten(0, 1).to(q.dtype)
        return out

    def segment_attention(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
        out = torch.empty_like(q)
        begin = 0
        for length in lengths:
            part = slice(begin, begin + length)
            queries, keys, values = (x[part].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
            out[part] = attended[0].transpose(0, 1)
            begin += length
        return out

    def _groups(self, batch: AttentionBatch, page_tokens: int) -> list[_Group]:
        if self._grouped is None or self._grouped[0] is not batch or self._grouped[1] != page_tokens:
            self._grouped = (batch, page_tokens, _group(batch, page_tokens))
        return self._grouped[2]


def _group(batch: AttentionBatch, page_tokens: int) -> list[_Group]:
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    lengths = [end - begin for begin, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
    for sequence, (query_len, context) in enumerate(zip(lengths, batch.context_lengths, strict=True)):
        members[query_len, -(-context // page_tokens)].append(sequence)
    groups = []
    for (query_len, num_pages), sequences in members.items():
        stride = max(1, MAX_GROUP_ROWS // (num_pages * page_tokens))
        for i in range(0, len(sequences), stride):
            groups.append(_make_group(batch, sequences[i : i + stride], query_len, num_pages, page_tokens))
    return groups


def _make_group(
    batch: AttentionBatch, sequences: list[int], query_len: int, num_pages: int, page_tokens: int
) -> _Group:
    device = batch.block_tables.device
    contexts = [batch.context_lengths[s] for s in sequences]
    starts = torch.tensor([batch.query_starts[s] for s in sequences], device=device)
    context_tensor = torch.tensor(contexts, device=device)
    return _Group(
        query_len=query_len,
        rows=(starts.unsqueeze(1) + torch.arange(query_len, device=device)).flatten(),
        tables=batch.block_tables[torch.tensor(sequences, device=device), :num_pages].long(),
        contexts=context_tensor,
        filled=context_tensor - (num_pages - 1) * page_tokens,
        max_context=max(contexts),
    )


def _causal(queries: Tensor, k: Tensor, v: Tensor, group: _Group, scale: float) -> Tensor:
    """queries [n, query_len, heads, head_dim] over k, v [n, kv_heads, keys, head_dim]; -> like queries, float32.

    The query heads of one KV head are laid beside each other as further query rows, so K and V are never repeated.
    """
    num_sequences, query_len, heads, head_dim = queries.shape
    kv_heads = k.shape[1]
    share = heads // kv_heads
    out = torch.empty_like(queries)
    for begin in range(0, query_len, QUERY_BLOCK_ROWS):
        end = min(begin + QUERY_BLOCK_ROWS, query_len)
        num_keys = group.max_context - query_len + end  # no row of this block sees more
        block = queries[:, begin:end].reshape(num_sequences, end - begin, kv_heads, share, head_dim)
        block = block.permute(0, 2, 1, 3, 4).reshape(num_sequences, kv_heads, -1, head_dim)
        last_seen = group.contexts.unsqueeze(1) - query_len + torch.arange(begin, end, device=k.device)
        last_seen = last_seen.repeat_interleave(share, dim=1)  # [n, rows * share]
        seen = torch.arange(num_keys, device=k.device) <= last_seen.unsqueeze(2)
        attended = F.scaled_dot_product_attention(
            block, k[:, :, :num_keys], v[:, :, :num_keys], attn_mask=seen.unsqueeze(1), scale=scale
        )
        attended = attended.view(num_sequences, kv_heads, end - begin, share, head_dim).permute(0, 2, 1, 3, 4)
        out[:, begin:end] = attended.reshape(num_sequences, end - begin, heads, head_dim)
    return out
