"""The decode kernel of CUDA C++ on a GPU against plain torch in float32."""

from __future__ import annotations

import random

import pytest
import torch
from attention_cases import LAYER, Case, Heads, make_case, padded
from torch import Tensor

from prism_server.ops import AttentionBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

BF16_ROUNDING = 2.0**-8
HEADS = Heads(query=32, kv=8, head_dim=128)


def decode(case: Case, out: Tensor | None = None) -> Tensor:
    from prism_server.ops.cuda.decode_attention import DecodeAttention, serves

    assert serves(case.kv.layout, case.q.shape[1], case.q.device)
    out = torch.full(case.q.flatten(1).shape, torch.nan, dtype=case.q.dtype, device="cuda") if out is None else out
    kernel = DecodeAttention(case.q.shape[1], case.kv.layout.num_kv_heads, case.q.device)
    for _ in range(2):  # whatever the first leaves in the workspace must not matter
        kernel(case.q, case.kv, LAYER, case.batch, case.scale, out)
    return out


def case_of(contexts: list[int], heads: Heads = HEADS, seed: int = 0, hard: bool = False) -> Case:
    lens = [(1, context) for context in contexts]
    return make_case(lens, heads, "fp8", 64, seed, "cuda", hard=hard, q_dtype=torch.bfloat16)


@pytest.mark.parametrize("share", [1, 2, 4, 8])
@pytest.mark.parametrize("hard", [False, True])
def test_rows_are_those_of_plain_torch(share: int, hard: bool) -> None:
    contexts = [1, 2, 63, 64, 65, 128, 129, 511, 2048, 5000]
    case = case_of(contexts, Heads(8 * share, 8, 128), seed=share, hard=hard)
    case.check(decode(case), BF16_ROUNDING)


@pytest.mark.parametrize("num_sequences", [1, 3, 5, 16, 17, 64, 256])
def test_batches_of_every_size_and_length(num_sequences: int) -> None:
    source = random.Random(num_sequences)
    case = case_of([source.randint(1, 400) for _ in range(num_sequences)], seed=num_sequences)
    case.check(decode(case), BF16_ROUNDING)


@pytest.mark.parametrize("contexts", [[32_768, 9_000], [20_000] * 40 + [70] * 40])
def test_a_long_context_is_cut_in_no_more_pieces_than_there_is_room_for(contexts: list[int]) -> None:
    case = case_of(contexts)
    case.check(decode(case), BF16_ROUNDING)


def test_what_comes_out_of_a_sequence_does_not_depend_on_the_others() -> None:
    contexts = [1, 300, 2_049, 32_768]  # more would be cut in other pieces
    case = case_of(contexts)
    together, batch = decode(case), case.batch
    for i, context in enumerate(contexts):
        places = slice(i, i + 1)
        alone = AttentionBatch.exact(
            (0, 1),
            (context,),
            batch.block_tables,
            batch.table_rows[places],
            batch.page_index[places],
            batch.slot_index[places],
        )
        out = decode(Case(case.q[places], case.kv, alone, case.scale))
        assert torch.equal(out[0], together[i]), f"{context} tokens"


def test_sequences_of_more_rows_and_padding_are_left_alone() -> None:
    case = make_case([(1, 300), (5, 700), (1, 90)], HEADS, "fp8", 64, 7, "cuda", q_dtype=torch.bfloat16)
    out = torch.full((7, 4096), 3.0, dtype=torch.bfloat16, device="cuda")
    decode(case, out)
    assert (out[1:6] == 3.0).all()
    expected = case.expected()[0].flatten(1)
    torch.testing.assert_close(out[[0, 6]].float(), expected[[0, 6]], rtol=0.02, atol=0.02)
    wide = Case(case.q, case.kv, padded(case.batch, 7, 4), case.scale)  # more would be cut in other pieces
    again = torch.full((7, 4096), 3.0, dtype=torch.bfloat16, device="cuda")
    decode(wide, again)
    assert torch.equal(again, out)


def test_a_captured_launch_follows_the_lengths_that_it_finds() -> None:
    from prism_server.ops.cuda.decode_attention import DecodeAttention

    case = case_of([500, 70])
    kernel, out = DecodeAttention(32, 8, case.q.device), torch.empty((2, 4096), dtype=torch.bfloat16, device="cuda")
    kernel(case.q, case.kv, LAYER, case.batch, case.scale, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(case.q, case.kv, LAYER, case.batch, case.scale, out)
    for contexts in ([500, 70], [64, 1], [449, 65]):
        case.batch.context_lengths.copy_(torch.tensor(contexts))
        graph.replay()
        kernel(case.q, case.kv, LAYER, case.batch, case.scale, eager := torch.empty_like(out))
        assert torch.equal(out, eager)


def test_more_sequences_than_the_kernel_knows_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 256"):
        decode(case_of([3] * 257))
