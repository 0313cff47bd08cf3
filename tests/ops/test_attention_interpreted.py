"""Paged attention in Triton's interpreter: tiny tiles, so that short contexts are cut into several pieces."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attention_cases import LAYER, Case, Heads, make_case, padded

from prism_server.capacity.page_layout import KVDtype
from prism_server.ops.triton.attention import PagedAttention, Tiles
from prism_server.ops.triton.attention_launch import Tile
from prism_server.ops.triton.kernels.attention import paged_attention
from prism_server.ops.triton.kernels.attention_parts import unpack_pages

HEADS = Heads(query=4, kv=2, head_dim=32)
TINY = Tiles(
    few=Tile(16, 16, 32, 4, 16, num_warps=1, num_stages=2, programs_per_sm=1, max_registers=255),
    some=Tile(32, 16, 32, 4, 64, num_warps=4, num_stages=2, programs_per_sm=1, max_registers=255),
    many=Tile(32, 16, 1 << 30, 1, 1, num_warps=4, num_stages=2, programs_per_sm=1, max_registers=255),
)
KV_DTYPES: tuple[KVDtype, ...] = ("fp8", "bf16", "fp32")
MIXED = [(1, 70), (12, 45), (2, 2), (1, 33), (9, 9)]


class Counted:
    def __init__(self, function: Callable[..., object]) -> None:
        self._function, self.calls = function, 0

    def __call__(self, *arguments: object, **options: object) -> object:
        self.calls += 1
        return self._function(*arguments, **options)


def attention(case: Case, max_sequences: int = 8, tiles: Tiles = TINY) -> PagedAttention:
    attend = PagedAttention(dict.fromkeys(KV_DTYPES, tiles))
    heads, head_dim = case.q.shape[1:]
    attend.reserve(64, max_sequences, heads, case.kv.layout.num_kv_heads, head_dim, DEVICE)
    return attend


@pytest.mark.parametrize("page_tokens", [8, 16, 64])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_mixed_step_equals_plain_torch(kv_dtype: KVDtype, page_tokens: int) -> None:
    case = make_case(MIXED, HEADS, kv_dtype, page_tokens, seed=page_tokens, device=DEVICE)
    case.check(attention(case)(case.q, case.kv, LAYER, case.batch, case.scale))


def test_zero_rows_outlier_heads_wide_magnitudes_and_peaked_softmax_stay_within_the_bound() -> None:
    case = make_case([(1, 70), (6, 40)], HEADS, "fp8", 16, seed=1, device=DEVICE, hard=True)
    case.check(attention(case)(case.q, case.kv, LAYER, case.batch, case.scale))


@pytest.mark.parametrize("heads", [Heads(2, 2, 32), Heads(8, 1, 32)])
def test_as_many_query_heads_as_kv_heads_and_eight_times_as_many(heads: Heads) -> None:
    case = make_case([(1, 40), (3, 20)], heads, "fp8", 16, seed=2, device=DEVICE)
    case.check(attention(case)(case.q, case.kv, LAYER, case.batch, case.scale))


def test_a_padded_batch_gives_the_same_bits() -> None:
    case = make_case(MIXED, HEADS, "fp8", 16, seed=3, device=DEVICE)
    attend = attention(case)
    exact = attend(case.q, case.kv, LAYER, case.batch, case.scale)
    q = torch.cat((case.q, torch.full_like(case.q[:5], torch.nan)))
    for _ in range(2):
        out = attend(q, case.kv, LAYER, padded(case.batch, len(q), 8), case.scale)
        assert torch.equal(out[: len(exact)], exact)


def test_a_sequence_alone_gives_the_same_bits_as_in_a_batch() -> None:
    case = make_case(MIXED, HEADS, "fp8", 16, seed=4, device=DEVICE)
    together = attention(case)(case.q, case.kv, LAYER, case.batch, case.scale)
    for s in range(len(MIXED)):
        begin, end = case.batch.query_starts[s : s + 2].tolist()
        alone = replace(
            case.batch,
            query_starts=torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
            context_lengths=case.batch.context_lengths[s : s + 1],
            table_rows=case.batch.table_rows[s : s + 1],
            page_index=case.batch.page_index[begin:end],
            slot_index=case.batch.slot_index[begin:end],
            host_query_starts=None,
            host_context_lengths=None,
        )
        out = attention(case)(case.q[begin:end].contiguous(), case.kv, LAYER, alone, case.scale)
        assert torch.equal(out, together[begin:end])


def test_partial_sums_that_do_not_fit_at_once_take_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([(4, 64)] * 8, HEADS, "fp32", 16, seed=5, device=DEVICE)
    at_once = attention(case)(case.q, case.kv, LAYER, case.batch, case.scale)
    case.check(at_once)
    monkeypatch.setattr("prism_server.ops.triton.attention.WORKSPACE_BYTES", 1)
    monkeypatch.setattr(paged_attention, "run", counted := Counted(paged_attention.run))
    assert torch.equal(attention(case)(case.q, case.kv, LAYER, case.batch, case.scale), at_once)
    assert counted.calls > 1


@pytest.mark.parametrize("workspace_bytes", [1 << 20, 19_200])
def test_unpacked_pages_in_one_go_or_in_several_and_contexts_too_long_for_them(
    monkeypatch: pytest.MonkeyPatch, workspace_bytes: int
) -> None:
    monkeypatch.setattr("prism_server.ops.triton.attention.WORKSPACE_BYTES", workspace_bytes)
    monkeypatch.setattr(unpack_pages, "run", counted := Counted(unpack_pages.run))
    tiles = replace(TINY, some=replace(TINY.some, block_rows=64, unpacked=True))
    case = make_case([(10, 13), (1, 70), (12, 45), (9, 16), (11, 14)], HEADS, "fp8", 16, seed=7, device=DEVICE)
    attend = attention(case, tiles=tiles)
    out = attend(case.q, case.kv, LAYER, case.batch, case.scale)
    case.check(out)
    assert (counted.calls == 1) == (workspace_bytes > 19_200)
    q = torch.cat((case.q, torch.full_like(case.q[:5], torch.nan)))
    counted.calls = 0
    assert torch.equal(attend(q, case.kv, LAYER, padded(case.batch, len(q), 8), case.scale)[: len(out)], out)
    assert counted.calls == 1, "a graph has room for the launches of one go"


def test_what_was_not_reserved_and_odd_shapes_are_refused() -> None:
    case = make_case([(1, 5)], HEADS, "fp32", 16, seed=6, device=DEVICE)
    attend = PagedAttention()
    with pytest.raises(ValueError, match="reserve"):
        attend(case.q, case.kv, LAYER, case.batch, case.scale)
    with pytest.raises(ValueError, match="room was reserved"):
        attention(case, max_sequences=0)(case.q, case.kv, LAYER, case.batch, case.scale)
    with pytest.raises(ValueError, match="query heads"):
        attend.reserve(8, 8, 6, 2, 128, DEVICE)
    with pytest.raises(ValueError, match="head_dim"):
        attend.reserve(8, 8, 4, 2, 72, DEVICE)
