"""FlashInfer's attention, ours and plain torch's: three opinions on one pool of pages."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from reference import attention_batch
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.errors import StartupError
from prism_server.ops import AttentionBatch, Ops, PagedKV, make_ops
from prism_server.ops.torch_ops import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SCALE = HEAD_DIM**-0.5


@pytest.fixture(scope="module")
def flashinfer() -> Ops:
    pytest.importorskip("flashinfer", exc_type=ImportError)
    return make_ops("flashinfer", "cuda")


def filled_pool(kv_dtype: KVDtype, page_tokens: int, num_pages: int) -> PagedKV:
    """Rows whose V differ in size by six orders, each head's by its own factor."""
    kv = PagedKV(PageLayout(2, KV_HEADS, HEAD_DIM, page_tokens, kv_dtype), num_pages, "cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (num_pages * page_tokens, KV_HEADS, HEAD_DIM)
    rows = torch.arange(shape[0], device="cuda")
    for layer in range(2):
        k, v = (torch.randn(shape, generator=generator, device="cuda") for _ in range(2))
        v *= 10.0 ** (torch.rand(shape[:2], generator=generator, device="cuda") * 6 - 3).unsqueeze(2)
        kv.store(layer, k.bfloat16(), v.bfloat16(), rows // page_tokens, rows % page_tokens)
    return kv


def a_batch(kv: PagedKV, lens: list[tuple[int, int]], seed: int = 0) -> AttentionBatch:
    """Sequences (query rows, context) over random pages; they may share them, as prefixes do."""
    widest = max(kv.layout.pages_for(context) for _, context in lens)
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randint(0, kv.num_pages, (len(lens), widest), generator=generator, dtype=torch.int32).cuda()
    return attention_batch(tables, [q for q, _ in lens], [c for _, c in lens], kv.layout.page_tokens)


def queries(batch: AttentionBatch) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(2)
    return torch.randn((batch.num_rows, HEADS, HEAD_DIM), generator=generator, device="cuda").bfloat16()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("page_tokens", [16, 64])
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 1), (1, 63), (1, 64), (1, 65), (1, 3000)],
        [(48, 1680), (1, 2048), (7, 7), (300, 301)],
        [(900, 900)],
    ],
)
def test_three_implementations_agree(
    flashinfer: Ops, kv_dtype: KVDtype, page_tokens: int, lens: list[tuple[int, int]]
) -> None:
    kv = filled_pool(kv_dtype, page_tokens, 200)
    batch = a_batch(kv, lens)
    q = queries(batch)
    expected = TorchOps().paged_attention(q.float(), kv, 1, batch, SCALE)
    for ops in (flashinfer, make_ops("triton", "cuda")):
        got = ops.paged_attention(q, kv, 1, batch, SCALE)
        assert got.shape == expected.shape
        assert error(got, expected) < 8e-3, ops.name


def test_a_plan_is_made_anew_when_a_sequence_crosses_a_page_boundary_and_never_used_for_another_batch(
    flashinfer: Ops,
) -> None:
    kv = filled_pool("fp8", 16, 50)
    tables = torch.randperm(48, generator=torch.Generator().manual_seed(3)).int().cuda().view(2, 24)
    batches = [attention_batch(tables, [1, 1], [context, 40], 16) for context in range(30, 36)]
    plain = TorchOps()
    for layer in (0, 1):
        for batch in (*batches, *reversed(batches)):
            q = queries(batch)
            expected = plain.paged_attention(q.float(), kv, layer, batch, SCALE)
            assert error(flashinfer.paged_attention(q, kv, layer, batch, SCALE), expected) < 8e-3


def test_what_it_does_not_know_is_refused_in_words(flashinfer: Ops) -> None:
    kv = filled_pool("bf16", 16, 4)
    batch = a_batch(kv, [(1, 5)])
    with pytest.raises(StartupError, match=r"model\.dtype, kv\.dtype"):
        flashinfer.paged_attention(queries(batch).float(), kv, 0, batch, SCALE)
    with pytest.raises(StartupError, match="fp32"):
        flashinfer.paged_attention(queries(batch), filled_pool("fp32", 16, 4), 0, batch, SCALE)
    padded = dataclasses.replace(batch, host_query_starts=None)
    with pytest.raises(ValueError, match="made for a graph"):
        flashinfer.paged_attention(queries(batch), kv, 0, padded, SCALE)
    assert not flashinfer.supports_graphs
