"""Paged attention on a GPU against plain torch in float32, and what a server relies on: bits, graphs, no compiling."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace

import pytest
import torch
from attention_cases import LAYER, Case, Heads, make_case, padded, run_once
from reference import attention_batch
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype
from prism_server.ops import AttentionBatch, PagedKV
from prism_server.ops.triton.attention import PagedAttention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

HEADS = Heads(query=32, kv=8, head_dim=128)
KV_DTYPES: tuple[KVDtype, ...] = ("fp8", "bf16", "fp32")
MAX_ROWS, MAX_SEQUENCES = 4096, 64
SHAPES: tuple[tuple[Heads, KVDtype, int, torch.dtype], ...] = (
    *((HEADS, kv_dtype, 64, q_dtype) for kv_dtype in KV_DTYPES for q_dtype in (torch.float32, torch.bfloat16)),
    (HEADS, "fp8", 16, torch.float32),
    (HEADS, "bf16", 16, torch.float32),
    (HEADS, "fp8", 128, torch.float32),
    (Heads(16, 8, 128), "fp8", 64, torch.float32),
    (Heads(64, 8, 128), "fp8", 64, torch.float32),
    (Heads(4, 4, 64), "bf16", 32, torch.float32),
    (Heads(8, 2, 256), "fp8", 64, torch.float32),
)
BF16_ROUNDING = 2.0**-8


def attention(heads: Heads = HEADS) -> PagedAttention:
    attend = PagedAttention()
    attend.reserve(MAX_ROWS, MAX_SEQUENCES, heads.query, heads.kv, heads.head_dim, "cuda")
    return attend


def run(attend: PagedAttention, case: Case, batch: AttentionBatch | None = None) -> Tensor:
    return attend(case.q, case.kv, LAYER, batch or case.batch, case.scale)


def random_lens(source: random.Random, num_sequences: int, max_context: int) -> list[tuple[int, int]]:
    """Decodes, short suffixes and a few long prefills."""
    lens = []
    for _ in range(num_sequences):
        context = source.choice((source.randint(1, 130), source.randint(1, max_context)))
        rows = source.choice((1, 1, 1, source.randint(2, 9), source.randint(10, 100), source.randint(100, 700)))
        lens.append((min(rows, context), context))
    return lens


def part_of(case: Case, s: int) -> tuple[Tensor, AttentionBatch]:
    """Sequence `s` alone: its queries, and a batch of it."""
    starts, contexts = case.batch.host_query_starts, case.batch.host_context_lengths
    assert starts is not None
    assert contexts is not None
    rows = slice(starts[s], starts[s + 1])
    batch = AttentionBatch.exact(
        (0, starts[s + 1] - starts[s]),
        (contexts[s],),
        case.batch.block_tables,
        case.batch.table_rows[s : s + 1],
        case.batch.page_index[rows],
        case.batch.slot_index[rows],
    )
    return case.q[rows].contiguous(), batch


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The kernels of all shapes, in parallel: one after the other takes minutes."""
    with ProcessPoolExecutor(8, multiprocessing.get_context("spawn")) as pool:
        for run_of_shape in [pool.submit(run_once, *shape, MAX_SEQUENCES) for shape in SHAPES]:
            run_of_shape.result()


@pytest.mark.parametrize(("heads", "kv_dtype", "page_tokens", "q_dtype"), SHAPES)
def test_random_steps_equal_plain_torch(
    heads: Heads, kv_dtype: KVDtype, page_tokens: int, q_dtype: torch.dtype
) -> None:
    attend = attention(heads)
    for seed in range(3):
        lens = random_lens(random.Random(f"{seed} {page_tokens} {heads}"), 12, 5000)
        case = make_case(lens, heads, kv_dtype, page_tokens, seed, "cuda", q_dtype=q_dtype)
        case.check(run(attend, case), BF16_ROUNDING if q_dtype is torch.bfloat16 else 0.0)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_zero_rows_outlier_heads_wide_magnitudes_and_peaked_softmax_stay_within_the_bound(kv_dtype: KVDtype) -> None:
    lens = [(1, 2500), (48, 1680), (1, 64), (600, 1500), (3, 800)]
    case = make_case(lens, HEADS, kv_dtype, 64, 4, "cuda", hard=True)
    case.check(run(attention(), case))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_sequence_gives_the_same_bits_alone_in_a_batch_and_padded(kv_dtype: KVDtype) -> None:
    lens = [*random_lens(random.Random(5), 30, 5000), (1, 5000), (48, 1680), (600, 1000)]
    case = make_case(lens, HEADS, kv_dtype, 64, 5, "cuda", q_dtype=torch.bfloat16)
    attend = attention()
    together = run(attend, case)
    for s in range(len(lens)):
        q, alone = part_of(case, s)
        begin = int(case.batch.query_starts[s])
        expected = together[begin : begin + len(q)]
        if kv_dtype == "fp8" and len(q) == 1:  # the decode kernel cuts contexts by the number of sequences, too
            got = attend(q, case.kv, LAYER, alone, case.scale)
            torch.testing.assert_close(got, expected, rtol=2 * BF16_ROUNDING, atol=1e-3)
            continue
        assert torch.equal(attend(q, case.kv, LAYER, alone, case.scale), expected), lens[s]
        assert torch.equal(attend(q, case.kv, LAYER, padded(alone, len(q), 4), case.scale), expected), lens[s]


def test_more_and_longer_contexts_than_unpacked_pages_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = [(300, 1000), (600, 4000), (1, 90), (300, 2000), (400, 900)]
    case = make_case(lens, HEADS, "fp8", 64, 10, "cuda", q_dtype=torch.bfloat16)
    monkeypatch.setattr("prism_server.ops.triton.attention.WORKSPACE_BYTES", 32 << 20)  # of 62 pages
    case.check(run(attention(), case), BF16_ROUNDING)


def test_runs_do_not_differ() -> None:
    case = make_case(random_lens(random.Random(6), 40, 3000), HEADS, "fp8", 64, 6, "cuda")
    attend = attention()
    first = run(attend, case)
    for _ in range(20):
        assert torch.equal(run(attend, case), first)


def test_a_graph_of_a_padded_step_serves_grown_contexts_and_other_pages() -> None:
    full = [1500, 900, 64, 2100, 700, 1111]
    case = make_case([(1, context) for context in full], HEADS, "fp8", 64, 7, "cuda", q_dtype=torch.bfloat16)
    tables = case.batch.block_tables
    steps = [
        ([1, 1, 1, 1], full[:4], tables[:4]),
        ([1, 1, 1, 1, 1, 1], [context // 2 for context in full], tables),
        ([1, 48, 1, 7, 64], full[1:], tables[1:]),
        ([64, 1], full[:1:-1][:2], tables.flip(0)[:2]),
    ]
    batches = [attention_batch(own.contiguous(), rows, contexts, 64) for rows, contexts, own in steps]
    num_rows, num_sequences = 128, 8
    attend = attention()
    q = torch.randn((num_rows, HEADS.query, HEADS.head_dim), dtype=torch.bfloat16, device="cuda")

    def full_size(batch: AttentionBatch) -> AttentionBatch:
        rows = tables.new_zeros((num_sequences, tables.shape[1]))
        rows[: len(batch.block_tables)] = batch.block_tables
        return replace(padded(batch, num_rows, num_sequences), block_tables=rows, max_query_rows=64)

    static = full_size(batches[0])
    attend(q, case.kv, LAYER, static, case.scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, case.kv, LAYER, static, case.scale)
    for batch in (*batches, batches[0]):
        step = full_size(batch)
        for field in fields(AttentionBatch):
            target, source = getattr(static, field.name), getattr(step, field.name)
            if isinstance(target, Tensor):
                target.copy_(source)
        q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        exact = attend(q[: batch.num_rows], case.kv, LAYER, batch, case.scale)
        got, counts = out[: batch.num_rows], batch.query_starts.diff()
        alone = (counts == 1).repeat_interleave(counts)  # these the decode kernel cuts by the number of sequences, too
        assert torch.equal(got[~alone], exact[~alone])
        torch.testing.assert_close(got[alone], exact[alone], rtol=2 * BF16_ROUNDING, atol=1e-3)
        replace(case, q=q[: batch.num_rows], batch=batch).check(exact, BF16_ROUNDING)


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
def test_addresses_beyond_two_to_the_31_elements(kv_dtype: KVDtype) -> None:
    case = make_case([(1, 1000), (30, 500), (300, 400)], HEADS, kv_dtype, 64, 8, "cuda")
    expected = run(attention(), case)
    layout = case.kv.layout
    huge = PagedKV(layout, 20_000, "cuda")
    assert huge.payload[0].numel() > 2**31
    for target, source in zip(huge.tensors(), case.kv.tensors(), strict=True):
        target[:, :, -case.kv.num_pages :] = source
    moved = replace(case.batch, block_tables=case.batch.block_tables + (huge.num_pages - case.kv.num_pages))
    assert torch.equal(run(attention(), replace(case, kv=huge), moved), expected)


@pytest.fixture
def compilations() -> Iterator[list[object]]:
    """Grows with every kernel that Triton compiles or loads; begins with one that nobody has launched before."""
    import triton

    @triton.jit
    def nothing() -> None:
        pass

    seen: list[object] = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, **__: seen.append(1)
    try:
        nothing[(1,)]()
        assert len(seen) == 1, "the hook is not called"
        yield seen
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before


def test_new_lengths_compile_nothing(compilations: list[object]) -> None:
    attend = attention()
    run(attend, make_case([(1, 16), (9, 33), (600, 700)], HEADS, "fp8", 64, 9, "cuda", q_dtype=torch.bfloat16))
    compiled = len(compilations)
    for seed in range(6):
        source = random.Random(seed)
        lens = random_lens(source, source.randint(1, 40), 3000)
        case = make_case(lens, HEADS, "fp8", 64, seed, "cuda", q_dtype=torch.bfloat16)
        run(attend, case)
        step = padded(case.batch, case.batch.num_rows, 50)
        starts = torch.cat((step.query_starts.new_zeros(seed + 1), step.query_starts))[seed + 1 :]
        contexts = torch.cat((step.context_lengths.new_zeros(seed + 1), step.context_lengths))[seed + 1 :]
        run(attend, case, replace(step, query_starts=starts, context_lengths=contexts))  # of any alignment
    assert len(compilations) == compiled
