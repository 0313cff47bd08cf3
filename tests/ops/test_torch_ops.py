"""The torch operators against the formulas they implement, written out."""

from __future__ import annotations

import pytest
import torch
from reference import attention_batch
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops import AttentionBatch, PagedKV
from prism_server.ops.torch_ops import TorchOps, rms_norm, swiglu

KV_DTYPES: tuple[KVDtype, ...] = ("fp8", "bf16", "fp32")
KV_HEADS, SHARE, HEAD_DIM = 2, 3, 32


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One sequence: the last rows of a causal attention, in float64. q [n, heads, d], k, v [rows, kv_heads, d]."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(share, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    hidden = torch.arange(k.shape[0]) > torch.arange(k.shape[0] - q.shape[0], k.shape[0]).unsqueeze(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).flatten(1)


def filled_pool(
    kv_dtype: KVDtype, page_tokens: int, contexts: list[int], k: list[Tensor], v: list[Tensor]
) -> tuple[PagedKV, Tensor]:
    """Rows of several sequences in pages of random order; all other slots are NaN."""
    layout = PageLayout(2, k[0].shape[1], k[0].shape[2], page_tokens, kv_dtype)
    counts = [layout.pages_for(context) for context in contexts]
    kv = PagedKV(layout, sum(counts) + 2, "cpu")
    kv.payload.view(torch.uint8).fill_(0xFF)
    if kv.scales is not None:
        kv.scales.fill_(float("nan"))
    pages = torch.randperm(sum(counts) + 2, generator=generator(9))[: sum(counts)].split(counts)
    tables = torch.full(
        (len(contexts), max(counts) + 1), 2**30, dtype=torch.int32
    )  # beyond a sequence's pages: nonsense
    for s, own in enumerate(pages):
        tables[s, : len(own)] = own
    everything = attention_batch(tables, contexts, contexts, page_tokens)
    kv.store(1, torch.cat(k), torch.cat(v), everything.page_index, everything.slot_index)
    return kv, tables


def check_attention(
    kv_dtype: KVDtype, page_tokens: int, lens: list[tuple[int, int]], k: list[Tensor], v: list[Tensor], q: list[Tensor]
) -> None:
    """Paged attention equals dense attention over the values as stored, to 1e-5 of the largest of these."""
    contexts = [context for _, context in lens]
    kv, tables = filled_pool(kv_dtype, page_tokens, contexts, k, v)
    batch = attention_batch(tables, [query_len for query_len, _ in lens], contexts, page_tokens)
    scale = q[0].shape[2] ** -0.5
    out = TorchOps().paged_attention(torch.cat(q), kv, 1, batch, scale)
    for s, context in enumerate(contexts):
        own = tables[s, : kv.layout.pages_for(context)].tolist()
        stored_k, stored_v = kv.read(1, own, context)
        rows = out[batch.query_starts[s] : batch.query_starts[s + 1]]
        bound = 1e-5 * float(stored_v.abs().max())
        torch.testing.assert_close(rows.double(), dense(q[s], stored_k, stored_v, scale), rtol=0, atol=bound)


def random_case(lens: list[tuple[int, int]], seed: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    source = generator(seed)
    k = [torch.randn((context, KV_HEADS, HEAD_DIM), generator=source) for _, context in lens]
    v = [torch.randn((context, KV_HEADS, HEAD_DIM), generator=source) for _, context in lens]
    q = [torch.randn((query_len, KV_HEADS * SHARE, HEAD_DIM), generator=source) for query_len, _ in lens]
    return k, v, q


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_paged_attention_is_dense_attention_over_the_stored_values(kv_dtype: KVDtype, page_tokens: int) -> None:
    source = generator(page_tokens)
    for seed in range(4):
        contexts = torch.randint(1, 50, (7,), generator=source).tolist()
        lens = [
            (1 if s % 2 else int(torch.randint(1, c + 1, (1,), generator=source)), c) for s, c in enumerate(contexts)
        ]
        check_attention(kv_dtype, page_tokens, lens, *random_case(lens, seed))


def test_a_prefill_of_several_query_blocks_and_many_decodes_are_attended_alike() -> None:
    lens = [(1100, 1150), *[(1, 300 + i) for i in range(20)]]  # 20 decodes are more than one group gathers at once
    check_attention("fp32", 64, lens, *random_case(lens, 3))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_zero_rows_outlier_heads_v_magnitudes_from_1e_3_to_1e3_and_peaked_softmax_stay_within_the_bound(
    kv_dtype: KVDtype,
) -> None:
    lens = [(5, 40), (1, 33)]
    k, v, q = random_case(lens, 4)
    for s in range(2):
        v[s] *= torch.logspace(-3, 3, v[s].shape[0])[torch.randperm(v[s].shape[0], generator=generator(s))].view(
            -1, 1, 1
        )
        v[s][:, 1] *= 50  # an outlier head
        k[s][::7] = 0
        v[s][::5] = 0
        q[s][0] *= 40  # all weight on one row
    check_attention(kv_dtype, 8, lens, k, v, q)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("fp8", 2**-4), ("bf16", 2**-8), ("fp32", 1e-6)])
def test_a_peaked_softmax_gives_the_row_it_picks_within_the_storage_bound(kv_dtype: KVDtype, bound: float) -> None:
    """However much smaller it is than its neighbours: each row has a scale of its own."""
    k = [torch.eye(32).unsqueeze(1) * 100]
    v = [torch.randn((32, 1, 32), generator=generator(6)) * torch.logspace(-3, 3, 32).view(32, 1, 1)]
    kv, tables = filled_pool(kv_dtype, 8, [32], k, v)
    batch = attention_batch(tables, [1], [32], 8)
    for row in range(32):
        out = TorchOps().paged_attention(k[0][row].view(1, 1, 32), kv, 1, batch, 1.0)
        absmax = v[0][row].abs().max()
        assert (out - v[0][row]).abs().max() <= bound * absmax * 1.001


def test_rows_that_follow_in_the_same_page_are_not_seen() -> None:
    lens = [(3, 10)]
    k, v, q = random_case(lens, 7)
    kv, tables = filled_pool("fp32", 4, [10], k, v)
    early = attention_batch(tables, [1], [8], 4)
    whole = attention_batch(tables, [3], [10], 4)
    ops = TorchOps()
    torch.testing.assert_close(
        ops.paged_attention(q[0][:1], kv, 1, early, 0.2), ops.paged_attention(q[0], kv, 1, whole, 0.2)[:1]
    )


def test_qk_norm_rope_store_normalises_rotates_and_stores() -> None:
    source = generator(8)
    rows, heads = 6, KV_HEADS * SHARE
    qkv = torch.randn((rows, (heads + 2 * KV_HEADS) * HEAD_DIM), generator=source)
    q_norm, k_norm = torch.rand(HEAD_DIM, generator=source), torch.rand(HEAD_DIM, generator=source)
    angle = torch.rand((rows, HEAD_DIM // 2), generator=source) * 6
    kv = PagedKV(PageLayout(3, KV_HEADS, HEAD_DIM, 4, "fp32"), 2, "cpu")
    batch = attention_batch(torch.tensor([[1, 0]], dtype=torch.int32), [rows], [rows], 4)
    got_q = TorchOps().qk_norm_rope_store(qkv, q_norm, k_norm, 1e-6, angle.cos(), angle.sin(), kv, 2, batch)

    def expected(x: Tensor, weight: Tensor) -> Tensor:
        x = x.view(rows, -1, HEAD_DIM).double()
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * angle.double()).unsqueeze(1)
        return torch.cat((pairs.real, pairs.imag), dim=-1).float()

    q, k, v = qkv.split([heads * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=1)
    torch.testing.assert_close(got_q, expected(q, q_norm))
    stored_k, stored_v = kv.read(2, [1, 0], rows)
    torch.testing.assert_close(stored_k, expected(k, k_norm))
    assert torch.equal(stored_v, v.view(rows, KV_HEADS, HEAD_DIM))


def test_segments_attend_to_themselves_alone() -> None:
    q, k, v = torch.randn((3, 13, 2, 72), generator=generator(10))
    lengths = [4, 1, 8]
    out = TorchOps().segment_attention(q, k, v, lengths, 72**-0.5)
    for part in zip(*(x.split(lengths) for x in (q, k, v, out)), strict=True):
        qs, ks, vs, got = (x.transpose(0, 1) for x in part)
        torch.testing.assert_close(got, (qs @ ks.transpose(1, 2) * 72**-0.5).softmax(-1) @ vs)


def test_swiglu_and_rms_norm_are_their_formulas() -> None:
    x = torch.randn((5, 12), generator=generator(11))
    gate, up = x[:, :6], x[:, 6:]
    torch.testing.assert_close(swiglu(x), gate / (1 + (-gate).exp()) * up)
    weight = torch.rand(12, generator=generator(12))
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), x / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * weight)


def test_a_batch_whose_lengths_do_not_fit_is_refused() -> None:
    index = torch.zeros(2, dtype=torch.int64)
    tables = torch.zeros((1, 1), dtype=torch.int32)
    for starts, contexts in (((0, 2), (1,)), ((0, 2), (2, 2)), ((0, 3), (3,)), ((0, 0), (2,)), ((1, 3), (2,))):
        with pytest.raises(ValueError):
            AttentionBatch.exact(starts, contexts, tables, index[:1], index, index)
