"""The Triton operators on a GPU against plain torch on the same GPU, over random shapes and at the sizes of serving."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import triton
from reference import Session, attention_batch, make_prompt, tiny_model
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.model import Qwen3VL
from prism_server.ops import AttentionBatch, HostPages, Ops, PagedKV, host_pages, make_ops
from prism_server.ops.torch_ops import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KV_DTYPES: tuple[KVDtype, ...] = ("fp8", "bf16", "fp32")
EPS = 1e-6
VOCAB = 151_936
TORCH = TorchOps()


@pytest.fixture(scope="module")
def ops() -> Ops:
    return make_ops("triton", "cuda")


def normal(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).to(dtype)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 13, 128, 129, 1000])
def test_products_of_any_number_of_rows_are_those_of_plain_torch(ops: Ops, num_rows: int, dtype: torch.dtype) -> None:
    hidden, inner, vocab = 2560, 1216, 4000
    x, norm = normal(num_rows, hidden, seed=1, dtype=dtype), normal(hidden, seed=2, dtype=dtype)
    weight = normal(2 * inner, hidden, seed=3, scale=hidden**-0.5, dtype=dtype)
    residual = normal(num_rows, 2 * inner, seed=4, dtype=dtype)
    head = normal(vocab, hidden, seed=5, scale=hidden**-0.5, dtype=dtype)
    wide = [part.double() for part in (x, norm, weight, residual, head)]
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for got, expected in (
        (ops.norm_linear(x, norm, EPS, weight), TORCH.norm_linear(wide[0], wide[1], EPS, wide[2])),
        (ops.norm_swiglu(x, norm, EPS, weight), TORCH.norm_swiglu(wide[0], wide[1], EPS, wide[2])),
        (ops.linear_add(x, weight, residual), TORCH.linear_add(wide[0], wide[2], wide[3])),
        (ops.norm_logits(x, norm, EPS, head), TORCH.norm_logits(wide[0], wide[1], EPS, wide[4])),
    ):
        assert got.shape == expected.shape
        assert relative_error(got, expected) < bound
    assert ops.norm_logits(x, norm, EPS, head).dtype == torch.float32


def poisoned_pool(layout: PageLayout, num_pages: int) -> PagedKV:
    kv = PagedKV(layout, num_pages, "cuda")
    for tensor in kv.tensors():
        tensor.view(torch.uint8).fill_(0xFF)
    return kv


def somewhere(num_rows: int, num_pages: int, page_tokens: int, seed: int) -> AttentionBatch:
    """Rows in random places of the pool, none twice; every seventh is padding."""
    places = torch.randperm(num_pages * page_tokens, generator=torch.Generator().manual_seed(seed))[:num_rows].cuda()
    pages = places // page_tokens
    pages[::7] = -1
    table = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    exact = AttentionBatch.exact((0, num_rows), (num_rows,), table, table[0], pages, places % page_tokens)
    return dataclasses.replace(exact, host_query_starts=None, host_context_lengths=None)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_tokens", "num_rows"),
    [(32, 8, 128, 64, 1), (32, 8, 128, 64, 700), (16, 8, 128, 16, 65), (64, 8, 128, 32, 9), (6, 2, 64, 16, 40)],
)
def test_normed_rotated_and_stored_rows_are_those_of_plain_torch(
    ops: Ops, kv_dtype: KVDtype, heads: int, kv_heads: int, head_dim: int, page_tokens: int, num_rows: int
) -> None:
    qkv = normal(num_rows, (heads + 2 * kv_heads) * head_dim, seed=1)
    qkv *= torch.logspace(-3, 3, num_rows, device="cuda").unsqueeze(1)
    q_norm, k_norm = 1 + normal(2, head_dim, seed=2, scale=0.2)
    angle = normal(num_rows, head_dim // 2, seed=3, scale=30.0)
    for dtype in (torch.float32, torch.bfloat16):
        layout = PageLayout(3, kv_heads, head_dim, page_tokens, kv_dtype)
        num_pages = num_rows // page_tokens + 3
        pools = [poisoned_pool(layout, num_pages) for _ in range(2)]
        where = somewhere(num_rows, num_pages, page_tokens, seed=4)
        q, expected = (
            backend.qk_norm_rope_store(
                qkv.to(dtype), q_norm.to(dtype), k_norm.to(dtype), EPS, angle.cos(), angle.sin(), kv, 2, where
            )
            for backend, kv in zip((ops, TORCH), pools, strict=True)
        )
        # A last bit of bfloat16, turned: of numbers up to four.
        step = 1e-5 if dtype == torch.float32 else 2**-5
        torch.testing.assert_close(q, expected, rtol=step, atol=step)
        assert dtype == torch.float32 or float((q == expected).float().mean()) > 0.98
        raw, wanted = ([tensor.view(torch.uint8) for tensor in kv.tensors()] for kv in pools)
        for got, plain in zip(raw, wanted, strict=True):
            assert torch.equal(got[:, 1], plain[:, 1])  # V: no sum is taken on its way, so every byte is equal
            assert torch.equal(got[:2], plain[:2])
            # K: sums of squares in another order differ in their last bit, and few bytes with them. Of float32's, more.
            same = float((got == plain).float().mean())
            assert same > (0.99 if dtype == torch.bfloat16 else 0.75)


def test_a_store_beyond_two_to_the_31_elements_lands_where_plain_torch_puts_it(ops: Ops) -> None:
    layout = PageLayout(2, 1, 128, 64, "fp8")
    num_pages = 2**30 // (64 * 128) + 5
    kv = PagedKV(layout, num_pages, "cuda")
    kv.payload.view(torch.uint8).zero_()
    small = poisoned_pool(layout, 1)
    qkv, norm = normal(64, 3 * 128, seed=1), normal(128, seed=2)
    angle = normal(64, 64, seed=3)
    far, slots = num_pages - 1, torch.arange(64, device="cuda")
    table = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    for pool, page in ((kv, far), (small, 0)):
        pages = torch.full_like(slots, page)
        batch = AttentionBatch.exact((0, 64), (64,), table, table[0], pages, slots)
        ops.qk_norm_rope_store(qkv, norm, norm, EPS, angle.cos(), angle.sin(), pool, 1, batch)
    ops.copy_rows(kv, [far], [far - 1], [64])
    for page in (far, far - 1):
        for got, expected in zip(kv.read(1, [page], 64), small.read(1, [0], 64), strict=True):
            assert torch.equal(got, expected)
    written = kv.payload.view(torch.uint8).view(4, num_pages, -1)
    assert int(written.any(dim=2).sum()) == 4


def test_rotation_in_the_vision_tower_is_that_of_plain_torch(ops: Ops) -> None:
    for heads, head_dim in ((16, 72), (16, 64), (2, 72)):
        qkv = normal(333, 3 * heads, head_dim, seed=1, dtype=torch.bfloat16)
        angle = normal(333, head_dim // 2, seed=2, scale=9.0)
        x = qkv[:, : 2 * heads]
        torch.testing.assert_close(
            ops.rotate(x, angle.cos(), angle.sin()), TORCH.rotate(x, angle.cos(), angle.sin()), rtol=2**-7, atol=1e-3
        )


@pytest.mark.parametrize("lengths", [[64] * 5, [100, 36, 100, 64, 36, 1], [777]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_segments_attend_to_themselves_alone(ops: Ops, dtype: torch.dtype, lengths: list[int]) -> None:
    qkv = normal(sum(lengths), 48, 72, seed=1, dtype=dtype)
    q, k, v = qkv[:, :16], qkv[:, 16:32], qkv[:, 32:]
    got = ops.segment_attention(q, k, v, lengths, 72**-0.5)
    expected = TORCH.segment_attention(q.float(), k.float(), v.float(), lengths, 72**-0.5)
    assert relative_error(got, expected) < (1e-3 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_copies_of_rows_are_byte_for_byte_those_of_plain_torch(ops: Ops, kv_dtype: KVDtype) -> None:
    layout = PageLayout(5, 8, 128, 64, kv_dtype)
    pools = [PagedKV(layout, 40, "cuda") for _ in range(2)]
    for tensors in zip(*(kv.tensors() for kv in pools), strict=True):
        noise = torch.randint(0, 256, tensors[0].view(torch.uint8).shape, device="cuda", dtype=torch.uint8)
        for tensor in tensors:
            tensor.view(torch.uint8).copy_(noise)
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    rows = torch.randint(0, 65, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    ops.copy_rows(pools[0], pages[:20], pages[20:], rows)
    pools[1].copy_rows(pages[:20], pages[20:], rows)
    for got, expected in zip(pools[0].tensors(), pools[1].tensors(), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pages_go_to_the_host_and_come_back_beside_other_work(
    kv_dtype: KVDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PageLayout(4, 8, 128, 64, kv_dtype)
    monkeypatch.setattr(host_pages, "STAGING_BYTES", 3 * layout.page_bytes)  # several parts
    host, plain = HostPages(layout, 9, pinned=True), HostPages(layout, 9)
    kv, on_cpu = PagedKV(layout, 20, "cuda"), PagedKV(layout, 20, "cpu")
    for device, cpu in zip(kv.tensors(), on_cpu.tensors(), strict=True):
        cpu.view(torch.uint8).random_(generator=torch.Generator().manual_seed(3))
        device.copy_(cpu)
    busy = normal(8192, 8192, seed=4, dtype=torch.bfloat16)
    pages, slots = [17, 3, 11, 0, 8, 19, 4, 6], [8, 0, 5, 1, 7, 2, 6, 3]
    for _ in range(20):
        busy = busy @ busy * 1e-2
    kv.payload[:, :, 3].view(torch.uint8).fill_(7)  # behind all that: what is swapped out is what compute has written
    on_cpu.payload[:, :, 3].view(torch.uint8).fill_(7)
    host.swap_out(kv, pages, slots)
    plain.swap_out(on_cpu, pages, slots)
    finished = host.finish_event()
    assert finished is not None
    finished.synchronize()
    for got, expected in zip(host.tensors(), plain.tensors(), strict=True):
        assert torch.equal(got[slots].view(torch.uint8), expected[slots].view(torch.uint8))
    targets = [1, 2, 5, 7, 9, 10, 12, 13]
    for _ in range(20):
        busy = busy @ busy * 1e-2
    for tensor in kv.tensors():
        tensor[:, :, targets] = 0  # launched before: must not win
    host.swap_in(kv, slots, targets)
    seen = [tensor[:, :, targets].clone() for tensor in kv.tensors()]  # launched after: must see the pages
    plain.swap_in(on_cpu, slots, targets)
    for got, expected in zip(seen, on_cpu.tensors(), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), expected[:, :, targets].view(torch.uint8))


def kinds_of_rows(num_rows: int) -> Tensor:
    """Peaked as a trained model's, flat, with equals, all equal, with blocked tokens, by turns: float32 [R, VOCAB]."""
    logits = normal(num_rows, VOCAB, seed=num_rows)
    for row in range(num_rows):
        kind = row % 6
        logits[row] *= (3.0, 1.28, 0.05, 1.0, 2.0, 0.0)[kind]
        if kind in (0, 4):
            logits[row, :50] += torch.linspace(14, 2, 50, device="cuda")
        if kind == 3:
            logits[row] = (logits[row] * 4).round() / 4
        if kind == 4:
            logits[row, 20:100_000] = -torch.inf
    return logits


@pytest.mark.parametrize("num_rows", [1, 7, 64, 256])
def test_the_best_token_is_that_of_plain_torch_of_equals_the_lowest_id(ops: Ops, num_rows: int) -> None:
    logits = kinds_of_rows(num_rows)
    best = logits.max(dim=-1, keepdim=True).values
    lowest = torch.where(logits == best, torch.arange(VOCAB, device="cuda"), VOCAB).amin(dim=-1)
    assert torch.equal(ops.argmax(logits), lowest)


@pytest.mark.parametrize("num_rows", [1, 24, 100])
def test_a_draw_is_that_of_sorting_unless_a_boundary_lies_within_rounding(ops: Ops, num_rows: int) -> None:
    logits = kinds_of_rows(num_rows)
    generator = torch.Generator().manual_seed(num_rows)

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (num_rows,), generator=generator)]

    params = torch.stack(
        [
            one_of(1e-3, 0.7, 1.0, 1.0, 100.0),
            one_of(1, 20, 50, 3000, VOCAB, VOCAB),
            one_of(1e-6, 0.8, 0.95, 1.0, 1.0),
            one_of(0.0, 0.0, 0.05, 1.0),
            torch.rand(num_rows, generator=generator, dtype=torch.float64),
        ],
        dim=1,
    ).cuda()
    params[::9, 4], params[1::9, 4] = 0.0, 0.999999
    got = ops.draw(logits, params)
    assert torch.equal(got, ops.draw(logits, params))
    near = [TORCH.draw(logits, params)]
    for moved in (1e-5, -1e-5):
        for column in (2, 3, 4):
            other = params.clone()
            other[:, column] = (other[:, column] + moved).clamp(0.0, 1.0)
            near.append(TORCH.draw(logits, other))
    differs = got != near[0]
    assert float(differs.float().mean()) <= 0.1
    lows, highs = (getattr(_ranks(logits, torch.stack(near)), name)(dim=0) for name in ("amin", "amax"))
    rank = _ranks(logits, got.unsqueeze(0))[0]
    assert ((rank >= lows) & (rank <= highs)).all()


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """How many tokens stand before each of `tokens` [n, R] in the order of draws."""
    ranks = []
    for some in tokens:
        own = logits.gather(1, some.unsqueeze(1))
        earlier = torch.arange(VOCAB, device="cuda") < some.unsqueeze(1)
        ranks.append(((logits > own) | ((logits == own) & earlier)).sum(dim=1))
    return torch.stack(ranks)


def test_a_draw_does_not_depend_on_the_other_rows(ops: Ops) -> None:
    logits = kinds_of_rows(30)
    params = torch.tensor([[0.8, VOCAB, 0.95, 0.0, 0.7]], dtype=torch.float64, device="cuda").repeat(30, 1)
    together = ops.draw(logits, params)
    alone = [ops.draw(logits[row : row + 1], params[row : row + 1]) for row in range(30)]
    assert torch.equal(together, torch.cat(alone))


def test_serving_a_new_length_compiles_nothing(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PageLayout(2, 8, 128, 64, "fp8")
    kv = poisoned_pool(layout, 64)

    def run(num_rows: int) -> None:
        qkv, norm = normal(num_rows, 48 * 128, seed=1, dtype=torch.bfloat16), normal(128, seed=2, dtype=torch.bfloat16)
        angle = normal(num_rows, 64, seed=3)
        for layer in (0, 1):
            where = somewhere(num_rows, 64, 64, seed=4)
            ops.qk_norm_rope_store(qkv, norm, norm, EPS, angle.cos(), angle.sin(), kv, layer, where)
        vision = qkv[:, : 32 * 72].unflatten(1, (32, 72))
        ops.rotate(vision, angle[:, :36].contiguous(), angle[:, :36].contiguous())
        ops.copy_rows(
            kv, list(range(num_rows % 20)), list(range(20, 20 + num_rows % 20)), [num_rows % 64] * (num_rows % 20)
        )
        logits = normal(num_rows % 32 + 1, VOCAB, seed=5)
        ops.argmax(logits)
        ops.draw(logits, torch.tensor([[1.0, 50, 0.9, 0.0, 0.5]], dtype=torch.float64, device="cuda").repeat(32, 1))

    run(16)
    compiled: list[str] = []

    def note(**about: object) -> None:
        compiled.append(str(about["repr"]))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    for num_rows in (1, 2, 15, 17, 64, 333, 1024):
        run(num_rows)
    assert compiled == []


def test_a_captured_choice_follows_its_logits(ops: Ops) -> None:
    logits = kinds_of_rows(8)
    ops.argmax(logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = ops.argmax(logits)
    logits.copy_(kinds_of_rows(8).flip(0))
    graph.replay()
    assert torch.equal(tokens, logits.argmax(dim=-1))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("kind", ["2b", "8b"])
def test_a_whole_model_gives_the_logits_of_plain_torch(
    tmp_path: Path, ops: Ops, kind: str, kv_dtype: KVDtype, dtype: torch.dtype, bound: float
) -> None:
    """In chunks and decodes of unequal lengths, with pictures. Logits reach about 3."""
    reference = tiny_model(kind)
    reference.save_pretrained(tmp_path)
    prompts = [make_prompt(reference, [(1, 6, 8), (1, 4, 4)], seed=1), make_prompt(reference, [(1, 4, 6)], seed=2)]
    lengths = [len(prompt.ids) for prompt in prompts]
    logits = []
    for backend in (ops, TORCH):
        session = Session(Qwen3VL.load(tmp_path, "cuda", dtype, backend), prompts, 16, kv_dtype)
        first = session.step({0: 14, 1: lengths[1] - 1})
        logits.append(torch.cat((first, session.step({0: lengths[0], 1: lengths[1]}))))
    # A last bit of K can move an FP8 row by a step, 2^-4 of its numbers.
    # Over BF16 pages the probabilities are BF16 numbers, too: 2^-9 of each, where plain torch has float32.
    bound = max(bound, {"fp8": 0.1, "bf16": 0.03, "fp32": 0.0}[kv_dtype])
    assert float((logits[0] - logits[1]).abs().max()) < bound
    assert relative_error(logits[0], logits[1]) < bound / 3


def test_room_grows_with_the_steps_where_nothing_was_reserved() -> None:
    fresh = make_ops("triton", "cuda")
    layout = PageLayout(1, 2, 64, 16, "bf16")
    kv = PagedKV(layout, 40, "cuda")
    for tensor in kv.tensors():
        tensor.copy_(normal(*tensor.shape, seed=2))
    for query_lens, contexts in (([1], [9]), ([30, 1, 1], [90, 17, 16]), ([1] * 9, [20] * 9)):
        tables = torch.arange(40, dtype=torch.int32, device="cuda")[: 4 * 9].view(9, 4)[: len(contexts)]
        tables = torch.cat([tables, tables[:, :2]], dim=1)
        batch = attention_batch(tables, query_lens, contexts, 16)
        q = normal(sum(query_lens), 4, 64, seed=1, dtype=torch.bfloat16)
        got, expected = (backend.paged_attention(q, kv, 0, batch, 0.125) for backend in (fresh, TORCH))
        assert relative_error(got, expected) < 1e-2
