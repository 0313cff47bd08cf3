"""FlashInfer's paged attention beside our other kernels: a second backend, and a second opinion for tests."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from prism_server.errors import StartupError
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.ops import TritonOps

WORKSPACE_BYTES = 256 << 20


class FlashInferOps(TritonOps):
    """Eager steps only: FlashInfer plans on the host, from host integers, once for each batch.

    A plan is kept for the very batch it was made of, and no other: a sequence that has crossed a page boundary comes in
    another batch. bfloat16 activations; FP8 pages (per-token-per-head scales) or bfloat16 ones.
    """

    name = "flashinfer"
    supports_graphs = False

    def __init__(self) -> None:
        super().__init__()
        self._wrapper: Any = None
        self._planned_for: tuple[object, ...] | None = None

    def paged_attention(self, q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        planned_for = (batch, q.dtype, q.shape[1], kv.layout, scale)
        if self._planned_for != planned_for:
            self._plan(q, kv, batch, scale)
            self._planned_for = planned_for
        scales = {} if kv.scales is None else {"kv_cache_sf": tuple(kv.scales[layer])}
        attended: Tensor = self._wrapper.run(q, tuple(kv.payload[layer]), **scales)
        return attended.flatten(1)

    def _plan(self, q: Tensor, kv: PagedKV, batch: AttentionBatch, scale: float) -> None:
        layout = kv.layout
        if q.dtype != torch.bfloat16 or layout.kv_dtype == "fp32":
            raise StartupError(
                f"backend 'flashinfer' knows bfloat16 activations with fp8 or bf16 pages, not {q.dtype} with "
                f"{layout.kv_dtype} (model.dtype, kv.dtype)"
            )
        starts, contexts = batch.host_query_starts, batch.host_context_lengths
        if starts is None or contexts is None:
            raise ValueError("FlashInfer attends to exact batches only, and this one was made for a graph")
        if self._wrapper is None:
            workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
            # fa2 reads both kinds of pages, and cuts long contexts
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        pages = [layout.pages_for(context) for context in contexts]
        ends = [0, *accumulate(pages)]
        owners = torch.tensor([s for s, count in enumerate(pages) for _ in range(count)])
        places = torch.tensor([page for begin, end in pairwise(ends) for page in range(end - begin)])
        owners, places = torch.stack((owners, places)).to(q.device)
        self._wrapper.plan(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            batch.block_tables[batch.table_rows[owners], places],
            torch.tensor([(context - 1) % layout.page_tokens + 1 for context in contexts], dtype=torch.int32),
            q.shape[1],
            layout.num_kv_heads,
            layout.head_dim,
            layout.page_tokens,
            causal=True,
            sm_scale=scale,
            q_data_type=q.dtype,
            kv_data_type=kv.payload.dtype,
            use_token_head_sf=layout.has_scales,
        )
