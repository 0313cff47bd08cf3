"""Steps over page pools with random contents, and how far attention may be from plain torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from reference import attention_batch
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops import AttentionBatch, PagedKV
from prism_server.ops.torch_ops import TorchOps
from prism_server.ops.triton.attention import PagedAttention

LAYER = 1
BOUNDS: dict[KVDtype, float] = {"fp8": 2e-3, "bf16": 8e-3, "fp32": 2e-4}
"""Of the error, relative to the largest of a head's sums of probabilities times |V|.

FP8: probabilities are rounded to half precision (2^-11 at most). BF16: to bfloat16 (2^-9 at most). All: logits of some
hundreds, as peaked softmax has, are off by some 1e-4 after float32 sums.
"""
FLOORS: dict[KVDtype, float] = {"fp8": 2.0**-32, "bf16": 2.0**-100, "fp32": 2.0**-100}
"""An error that always is allowed: where zero rows have all the probability, what the others add vanishes.

FP8: weights, p times V's scale, are in half precision relative to their largest. A zero row with nearly all the
probability makes that 2^-20 / 448, and the others are off by up to 2^-25 of it (half the least number): with E4M3
values up to 448 by 2^-45 a token, by 2^-32 for 8,192 tokens. BF16, FP32: weights have float32's exponents.
"""


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    head_dim: int


@dataclass(frozen=True)
class Case:
    q: Tensor
    kv: PagedKV
    batch: AttentionBatch
    scale: float

    def expected(self) -> tuple[Tensor, Tensor]:
        """Plain torch in float32: what comes out [T, heads, head_dim], and the same of |V|."""
        ops, wide = TorchOps(), self.q.float()
        signless = PagedKV(self.kv.layout, 0, self.kv.device)
        signless.num_pages, signless.scales = self.kv.num_pages, self.kv.scales
        raw = self.kv.tensors()[0].clone()
        raw[:, 1] = raw[:, 1] & 0x7F if raw.dtype is torch.uint8 else raw[:, 1].abs()
        signless._raw = raw
        outs = (ops.paged_attention(wide, kv, LAYER, self.batch, self.scale) for kv in (self.kv, signless))
        out, magnitude = (out.view(self.q.shape) for out in outs)
        return out, magnitude

    def check(self, out: Tensor, rounding: float = 0.0) -> None:
        """`rounding`: of `out` to its dtype, relative."""
        expected, magnitude = self.expected()
        kv_dtype = self.kv.layout.kv_dtype
        allowed = (BOUNDS[kv_dtype] + rounding) * magnitude.amax(dim=-1, keepdim=True) + FLOORS[kv_dtype]
        error = (out.view(self.q.shape).float() - expected).abs()
        worst = (error / allowed).max()
        assert worst <= 1.0, f"the error is {float(worst):.2f} of what is allowed"  # NaN is not


def make_case(
    lens: Sequence[tuple[int, int]],
    heads: Heads,
    kv_dtype: KVDtype,
    page_tokens: int,
    seed: int,
    device: str,
    *,
    hard: bool = False,
    q_dtype: torch.dtype = torch.float32,
    spare_pages: int = 3,
) -> Case:
    """`lens`: query rows and context of each sequence. Pages in random order; all that is not theirs is NaN.

    `hard`: rows of zeros, V magnitudes from 1e-3 to 1e3, an outlier head, softmax peaked on one row.
    """
    source = torch.Generator(device).manual_seed(seed)
    layout = PageLayout(LAYER + 1, heads.kv, heads.head_dim, page_tokens, kv_dtype)
    contexts = [context for _, context in lens]
    counts = [layout.pages_for(context) for context in contexts]
    kv = PagedKV(layout, sum(counts) + spare_pages, device)
    kv.tensors()[0].fill_(0xFF if layout.has_scales else torch.nan)
    if kv.scales is not None:
        kv.scales.fill_(torch.nan)
    order = torch.split(torch.randperm(kv.num_pages, generator=source, device=device)[: sum(counts)], counts)
    tables = torch.full((len(lens), max(counts) + 1), 1 << 30, dtype=torch.int32, device=device)
    for table, own in zip(tables, order, strict=True):
        table[: len(own)] = own
    everything = attention_batch(tables, contexts, contexts, page_tokens)
    shape = (sum(contexts), heads.kv, heads.head_dim)
    k, v = (torch.randn(shape, generator=source, device=device) for _ in range(2))
    batch = attention_batch(tables, [rows for rows, _ in lens], contexts, page_tokens)
    q = torch.randn((batch.num_rows, heads.query, heads.head_dim), generator=source, device=device)
    if hard:
        v *= 10.0 ** (torch.rand((shape[0], 1, 1), generator=source, device=device) * 6 - 3)
        v[:, 0] *= 50
        k[::7] = 0
        v[::5] = 0
        q[::2] *= 40
    kv.store(LAYER, k, v, everything.page_index, everything.slot_index)
    q = q.bfloat16().to(q_dtype)  # values that a model of bfloat16 would have
    return Case(q, kv, batch, heads.head_dim**-0.5)


def padded(batch: AttentionBatch, num_rows: int, num_sequences: int) -> AttentionBatch:
    """The same step as a graph's batch: device tensors only, of so many rows and sequences."""
    more, rows = num_sequences - batch.num_sequences, num_rows - batch.num_rows

    def longer(x: Tensor, count: int, value: int) -> Tensor:
        return torch.cat((x, x.new_full((count,), value)))

    return replace(
        batch,
        query_starts=longer(batch.query_starts, more, batch.num_rows),
        context_lengths=longer(batch.context_lengths, more, 0),
        table_rows=longer(batch.table_rows, more, 0),
        page_index=longer(batch.page_index, rows, -1),
        slot_index=longer(batch.slot_index, rows, 0),
        host_query_starts=None,
        host_context_lengths=None,
    )


def run_once(heads: Heads, kv_dtype: KVDtype, page_tokens: int, q_dtype: torch.dtype, max_sequences: int) -> None:
    """Every kernel of a shape, on the GPU: in a process of its own, it leaves them in Triton's cache on disk."""
    attend = PagedAttention()
    attend.reserve(1024, max_sequences, heads.query, heads.kv, heads.head_dim, "cuda")
    case = make_case([(1, 300), (40, 300), (300, 300)], heads, kv_dtype, page_tokens, 0, "cuda", q_dtype=q_dtype)
    attend(case.q, case.kv, LAYER, case.batch, case.scale)
    torch.cuda.synchronize()
