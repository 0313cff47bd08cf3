"""Greedy tokens of Qwen3-VL-8B's head: by its FP8 copy, beside the head's own product and the best of its logits.

As served first, at all row counts; then other ways to cut the product with the copy, as far as the time goes.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import chain

import torch

from prism_server.bench.kernel_timing import KernelTiming, graph_us
from prism_server.bench.linear_candidates import EPS, SHAPES
from prism_server.ops import Fp8Head
from prism_server.ops.fp8_head import NUM_CANDIDATES
from prism_server.ops.triton import candidates, linear, select
from prism_server.ops.triton.linear_configs import ProductClass, ProductConfig, rows_bucket

ROW_COUNTS = (1, 8, 16, 32, 64, 128)
CALLS = 4
REPEATS = 10
FEW_ROWS_CUTS = (
    ProductConfig(64, 128, prefetch_columns=0),
    ProductConfig(64, 128, num_stages=4, tma=False, prefetch_columns=0),
    ProductConfig(64, 256, num_stages=3, prefetch_columns=0),
    ProductConfig(128, 64, num_warps=8, num_stages=4, prefetch_columns=0),
)
MANY_ROWS_CUTS = (
    ProductConfig(64, 64, tma=False, prefetch_columns=0),
    ProductConfig(128, 64, num_warps=8, prefetch_columns=0),
    ProductConfig(128, 64, num_stages=3, tma=False, prefetch_columns=0),
    ProductConfig(256, 32, num_warps=8, prefetch_columns=0),
)


def measure(seconds: float) -> list[KernelTiming]:
    deadline = time.monotonic() + seconds
    bench = _HeadBench()
    served = ((rows, candidates.CONFIGS[rows_bucket(rows)]) for rows in ROW_COUNTS)
    others = ((rows, cut) for rows in ROW_COUNTS for cut in (FEW_ROWS_CUTS if rows <= 32 else MANY_ROWS_CUTS))
    found = []
    for num_rows, cut in chain(served, others):
        if time.monotonic() < deadline:
            found.append(bench.time(num_rows, cut))
    return found


class _HeadBench:
    """One head and its copy: each call reads far more than the L2 holds."""

    def __init__(self) -> None:
        shape = self._shape = SHAPES[ProductClass.HEAD]
        size = (shape.weight_rows, shape.depth)
        self._head = Fp8Head.of(torch.randn(size, dtype=torch.bfloat16, device="cuda").mul_(0.02))
        self._twins_us: dict[int, float] = {}

    def time(self, num_rows: int, cut: ProductConfig) -> KernelTiming:
        shape, head = self._shape, self._head
        x, norm, _ = shape.activations(num_rows)
        us = graph_us([partial(candidates.norm_best, x, norm, EPS, head, cut)] * CALLS, REPEATS)
        if num_rows not in self._twins_us:
            by_head = partial(linear.norm_logits, x, norm, EPS, head.weight)
            self._twins_us[num_rows] = graph_us([lambda: select.argmax(by_head())] * CALLS, REPEATS)
        moved = head.pairs.nbytes + head.scales.nbytes + num_rows * NUM_CANDIDATES * shape.depth * 2
        engine = "TMA" if cut.tma else "cp.async"
        size = f"{num_rows} rows, {cut.block_n} x {cut.block_k}, {cut.num_warps} warps, {cut.num_stages}, {engine}"
        return KernelTiming.of("greedy by FP8 copy", size, us, moved, "by the head", self._twins_us[num_rows])
