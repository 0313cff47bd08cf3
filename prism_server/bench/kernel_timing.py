"""How kernels are timed: many in one CUDA graph, over more data than the L2 holds, beside what memory can give.

A timing module (`kernels_linear.py`, `kernels_attention.py`, ...) has one function, `measure(seconds)`, which spends
about that long and returns its timings; `prism-bench kernels` runs them all.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch

Thunk = Callable[[], object]
"""Launches work on the current stream; no synchronisation with the host, what it makes is thrown away."""

GEMV_SHAPE = (151_936, 4096)
"""The head of Qwen3-VL-8B, 1.24 GB in BF16: far beyond the L2."""
GEMV_REPEATS = 15


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One kernel at one shape beside its twin (the library's kernel, or plain torch)."""

    name: str
    shape: str
    """For people: `8 x 4096 -> 6144`, `batch 64, context 2048`."""
    us: float
    bytes_moved: int
    """The least that must cross the memory bus; 0 where arithmetic bounds the kernel."""
    bandwidth_fraction: float
    """Of `measured_bandwidth()`; 0 where `bytes_moved` is."""
    twin_name: str
    twin_us: float

    @classmethod
    def of(
        cls, name: str, shape: str, us: float, bytes_moved: int, twin_name: str = "", twin_us: float = 0.0
    ) -> KernelTiming:
        """With the fraction worked out on this card. Without a twin, `twin_us` is 0."""
        fraction = bytes_moved / (us * 1e-6) / measured_bandwidth()
        return cls(name, shape, us, bytes_moved, fraction, twin_name, twin_us)

    @property
    def speedup(self) -> float:
        """The twin's time over the kernel's; 0 without a twin."""
        return self.twin_us / self.us

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def graph_us(thunks: Sequence[Thunk], repeats: int = 20) -> float:
    """Median microseconds of one thunk, from `repeats` replays of a CUDA graph that holds all of them in order.

    Give thunks over different buffers, together several times the L2 (50 MB on an H200), or what is timed is the
    cache; some twenty of them make the graph's own launch small. Every thunk runs twice outside the graph before.
    """
    warm_up(thunks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for thunk in thunks:
            thunk()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times_ms: list[float] = [begin.elapsed_time(end) for begin, end in pairwise(marks)]
    return 1e3 * statistics.median(times_ms) / len(thunks)


def warm_up(thunks: Sequence[Thunk]) -> None:
    """Compiles, tunes and opens libraries, on a side stream as capture asks for."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for thunk in thunks:
                thunk()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


@functools.cache
def measured_bandwidth() -> float:
    """Bytes a second that this card reads at best: torch's matrix-vector product in BF16 over 1.24 GB."""
    matrix = torch.randn(GEMV_SHAPE, dtype=torch.bfloat16, device="cuda")
    vector = torch.randn(GEMV_SHAPE[1], dtype=torch.bfloat16, device="cuda")
    row = vector.unsqueeze(0)
    products: list[Thunk] = [lambda: matrix.mv(vector), lambda: torch.nn.functional.linear(row, matrix)]
    best_us = min(graph_us([product] * 4, GEMV_REPEATS) for product in products)
    return matrix.nbytes / (best_us * 1e-6)
