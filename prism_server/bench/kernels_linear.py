"""The skinny products of Qwen3-VL-8B, cut as served, beside cuBLAS; weights are read in turn, from beyond the L2.

cuBLAS gets the same norm before it, and does without SwiGLU and residual. How the cuts were found: `linear_search`.
"""

from __future__ import annotations

import itertools
import math
import time

import torch
from torch.nn import functional as F

from prism_server.bench.kernel_timing import KernelTiming, Thunk, graph_us
from prism_server.bench.linear_candidates import EPS, SHAPES, Shape
from prism_server.ops.triton import linear
from prism_server.ops.triton.linear_configs import CONFIGS, ProductClass, rows_bucket

ROW_COUNTS = (1, 8, 32, 64, 128)
MIN_GRAPH_BYTES = 2 << 30
"""Of weights, read by the products of one graph: so much that its own launch is small."""
NORMED = (ProductClass.QKV, ProductClass.GATE_UP, ProductClass.HEAD)
REPEATS = 10


def measure(seconds: float) -> list[KernelTiming]:
    """All classes at few rows first, as far as the time goes. All weights together are 13 GB."""
    deadline = time.monotonic() + seconds
    benches = [ProductBench(shape) for shape in SHAPES.values()]
    found = []
    for num_rows, bench in itertools.product(ROW_COUNTS, benches):
        if time.monotonic() < deadline:
            found.append(bench.time(num_rows))
    return found


class ProductBench:
    """Weights of one shape, and timings of products with them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        size = (shape.weight_rows, shape.depth)
        self._weights = [torch.randn(size, dtype=torch.bfloat16, device="cuda").mul_(0.02) for _ in range(shape.copies)]
        self._num_calls = max(shape.copies, math.ceil(MIN_GRAPH_BYTES / shape.weight_bytes))

    def time(self, num_rows: int) -> KernelTiming:
        shape, which = self.shape, self.shape.product_class
        x, norm, residual = shape.activations(num_rows)
        config = CONFIGS[which, rows_bucket(num_rows)]
        normed = which in NORMED

        def ours(number: int) -> Thunk:
            weight = self._weights[number % shape.copies]
            return lambda: shape.call(x, weight, config, norm=norm, residual=residual)

        def twin(number: int) -> Thunk:
            weight = self._weights[number % shape.copies]
            return lambda: F.linear(linear.rms_norm(x, norm, EPS) if normed else x, weight)

        us, twin_us = (graph_us([one(number) for number in range(self._num_calls)], REPEATS) for one in (ours, twin))
        size = f"{num_rows} x {shape.depth} -> {shape.weight_rows}"
        twin_name = "norm, cuBLAS" if normed else "cuBLAS"
        return KernelTiming.of(f"product {which}", size, us, shape.weight_bytes, twin_name, twin_us)
