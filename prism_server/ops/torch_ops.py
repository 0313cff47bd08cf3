"""Operators in plain torch: the CPU's implementation, and the oracle of every other backend."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.ops.fp8_head import NUM_CANDIDATES, Fp8Head
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

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        return F.linear(rms_norm(x, norm, eps), weight)

    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        return swiglu(self.norm_linear(x, norm, eps, gate_up))

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(x, weight)

    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, head: Tensor) -> Tensor:
        return self.norm_linear(x, norm, eps, head).float()

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def norm_best(self, x: Tensor, norm: Tensor, eps: float, head: Fp8Head) -> Tensor:
        normed = rms_norm(x, norm, eps).float()
        likely = F.linear(normed, head.dequantised()).sort(dim=-1, descending=True, stable=True).indices
        candidates = likely[:, :NUM_CANDIDATES].sort(dim=-1).values  # by id: of equals the first is taken
        logits = torch.bmm(head.weight[candidates].float(), normed.unsqueeze(2)).squeeze(2)
        return candidates.gather(1, logits.argmax(dim=-1, keepdim=True)).squeeze(1)

    def draw(self, logits: Tensor, params: Tensor) -> Tensor:
        temperature, top_k, top_p, min_p, where = (part.unsqueeze(1) for part in params.unbind(1))
        wide = logits.double()
        scaled = (wide - wide.amax(dim=-1, keepdim=True)) / temperature  # from 0 down: no temperature overflows it
        ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        probability = ordered.masked_fill(rank >= top_k, -torch.inf).softmax(dim=-1)
        before = probability.cumsum(dim=-1) - probability
        keep = (before < top_p) & (probability >= min_p * probability[:, :1])
        keep[:, 0] = True
        cumulative = probability.masked_fill(~keep, 0.0).cumsum(dim=-1)
        place = (cumulative <= where * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
        last_kept = keep.sum(dim=-1, keepdim=True) - 1
        return order.gather(1, torch.minimum(place, last_kept)).squeeze(1)

    def copy_rows(self, kv: PagedKV, sources: Sequence[int], targets: Sequence[int], rows: Sequence[int]) -> None:
        kv.copy_rows(sources, targets, rows)

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
        q = self.rotate(rms_norm(q, q_norm, eps), cos, sin)
        k = self.rotate(rms_norm(k, k_norm, eps), cos, sin)
        pages, slots = batch.page_index, batch.slot_index
        if batch.host_query_starts is None:  # rows of padding are stored nowhere
            k, v, pages, slots = (part[batch.page_index >= 0] for part in (k, v, pages, slots))
        kv.store(layer, k, v, pages, slots)
        return q

    def paged_attention(self, q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        num_rows, heads, head_dim = q.shape
        make = torch.zeros if batch.host_query_starts is None else torch.empty  # rows of padding are in no group
        out = make((num_rows, heads * head_dim), dtype=q.dtype, device=q.device)
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

    def packed_attention(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> Tensor:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        segments = {(begin, end) for _, begin, end in tiles.tolist() if end > begin}  # from the device: this one may
        for begin, end in segments:
            rows = slice(begin, end)
            out[rows] = self.segment_attention(q[rows], k[rows], v[rows], [end - begin], scale)
        return out

    def _groups(self, batch: AttentionBatch, page_tokens: int) -> list[_Group]:
        if self._grouped is None or self._grouped[0] is not batch or self._grouped[1] != page_tokens:
            self._grouped = (batch, page_tokens, _group(batch, page_tokens))
        return self._grouped[2]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] divided by its root mean square, rounded to its dtype, times weight [n]."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2n], gate then up -> silu(gate) * up [T, n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _group(batch: AttentionBatch, page_tokens: int) -> list[_Group]:
    starts, contexts = batch.host_query_starts, batch.host_context_lengths
    if starts is None or contexts is None:  # padded, as for a graph: read from the device, which this backend may
        starts, contexts = tuple(batch.query_starts.tolist()), tuple(batch.context_lengths.tolist())
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    lengths = [end - begin for begin, end in pairwise(starts)]
    for sequence, (query_len, context) in enumerate(zip(lengths, contexts, strict=True)):
        members[query_len, -(-context // page_tokens)].append(sequence)
    groups = []
    for (query_len, num_pages), sequences in members.items():
        if query_len == 0:
            continue
        stride = max(1, MAX_GROUP_ROWS // (num_pages * page_tokens))
        for i in range(0, len(sequences), stride):
            part = sequences[i : i + stride]
            places = [(starts[s], contexts[s], s) for s in part]
            groups.append(_make_group(batch, places, query_len, num_pages, page_tokens))
    return groups


def _make_group(
    batch: AttentionBatch, places: list[tuple[int, int, int]], query_len: int, num_pages: int, page_tokens: int
) -> _Group:
    """`places`: first row, context and number of each sequence."""
    device = batch.block_tables.device
    starts, contexts, sequences = torch.tensor(places, device=device).unbind(1)
    return _Group(
        query_len=query_len,
        rows=(starts.unsqueeze(1) + torch.arange(query_len, device=device)).flatten(),
        tables=batch.block_tables[batch.table_rows[sequences], :num_pages].long(),
        contexts=contexts,
        filled=contexts - (num_pages - 1) * page_tokens,
        max_context=max(context for _, context, _ in places),
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
