"""Skinny products on a GPU: every way to cut them, timed in graphs over weights beyond the L2, cuBLAS beside them.

`python -m prism_server.bench.linear_search OUT SECONDS` (`tune`) writes what it found and prints the table of
`linear_configs`; then it times chains of layers.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.bench.compile_ahead import compile_all
from prism_server.bench.linear_candidates import EPS, HIDDEN, SHAPES, Shape, Task, all_tasks, compile_one
from prism_server.bench.report import environment, table, write_json
from prism_server.ops.torch_ops import TorchOps, rms_norm
from prism_server.ops.triton import linear
from prism_server.ops.triton.linear_configs import CONFIGS, ROW_BUCKETS, ProductClass, ProductConfig, rows_bucket

READ_BYTES_PER_US = 4.11e6
"""What an H200 reads of weights in a product with a vector."""
ROW_COUNTS = (1, 8, 16, 32, 64, 128)
ROWS_OF_BUCKET = {16: (8, 1, 16), 32: (32,), 64: (64,), 128: (128,)}
"""Row counts to time; the first with every cut, others with the best ones."""
PREFETCHES = (0, 256, 1024, 2048)
"""Columns, tried with the best cuts."""
NUM_BEST = 4
NUM_LAYERS = 36
MIN_GRAPH_US = 600.0
REPLAYS = 9
COMPILE_SHARE = 0.4
CHAIN_SHARE = 0.15
"""Of the seconds given: for compiling, and at the end for chains of layers."""

Configs = dict[tuple[ProductClass, int], ProductConfig]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """One product in one shape; `config` is None for cuBLAS, which does the bare product only."""

    product_class: ProductClass
    num_rows: int
    config: ProductConfig | None
    us: float
    weight_bytes: int

    @property
    def fraction(self) -> float:
        return self.weight_bytes / self.us / READ_BYTES_PER_US

    def as_json(self) -> dict[str, Any]:
        return {
            "shape": self.product_class,
            "rows": self.num_rows,
            "config": asdict(self.config) if self.config else "cublas",
            "us": round(self.us, 2),
            "TB/s": round(self.weight_bytes / self.us / 1e6, 3),
            "fraction_of_4.11": round(self.fraction, 4),
        }


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """Mean time of a call when all run one after the other in a graph, median of several replays."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    graph.replay()
    return median(replay_us(graph) for _ in range(REPLAYS)) / len(calls)


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def random_weights(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(0.02)


class ShapeBench:
    """Weights of one shape, and timings of products with them."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._weights = [random_weights(shape.weight_rows, shape.depth) for _ in range(shape.copies)]
        self._num_calls = max(shape.copies, math.ceil(MIN_GRAPH_US * READ_BYTES_PER_US / shape.weight_bytes))

    def time(self, num_rows: int, config: ProductConfig | None) -> Timing | None:
        """None when the cut does not run: that is logged, and the search goes on."""
        shape = self.shape
        x, norm, residual = shape.activations(num_rows)

        def one(number: int) -> Callable[[], Tensor]:
            weight = self._weights[number % len(self._weights)]
            if config is None:
                return lambda: F.linear(x, weight)
            return lambda: shape.call(x, weight, config, norm=norm, residual=residual)

        try:
            us = time_us([one(number) for number in range(self._num_calls)])
        except Exception as error:
            log.warning("%s, %d rows, %s: %s", shape.product_class, num_rows, config, str(error)[:200])
            return None
        return Timing(shape.product_class, num_rows, config, us, shape.weight_bytes)


def search(bucket: int, cuts: Iterable[ProductConfig], bench: ShapeBench, deadline: float) -> list[Timing]:
    """Times every cut at one row count, then the best, with more and less prefetch, at all row counts of the bucket."""
    first, *others = ROWS_OF_BUCKET[bucket]
    found: list[Timing] = []

    def measure(num_rows: int, config: ProductConfig | None) -> None:
        if time.monotonic() < deadline and (timing := bench.time(num_rows, config)):
            found.append(timing)

    def best() -> list[ProductConfig]:
        ordered = sorted((t for t in found if t.config and t.num_rows == first), key=lambda t: t.us)
        return [t.config for t in ordered[:NUM_BEST] if t.config]

    for num_rows in (first, *others):
        measure(num_rows, None)
    for config in cuts:
        measure(first, config)
    for config, prefetch_columns in itertools.product(best()[:2], PREFETCHES):
        measure(first, replace(config, prefetch_columns=prefetch_columns))
    for config, num_rows in itertools.product(best(), others):
        measure(num_rows, config)
    return found


def picks(timings: Sequence[Timing]) -> Configs:
    """The best cut per class and bucket, all buckets of a class with that split which is best for them together."""
    best: dict[tuple[ProductClass, int, int], tuple[float, ProductConfig]] = {}
    for timing in timings:
        bucket = rows_bucket(timing.num_rows)
        if timing.config and timing.num_rows == ROWS_OF_BUCKET[bucket][0]:
            key = (timing.product_class, timing.config.split_k, bucket)
            best[key] = min(best.get(key, (math.inf, timing.config)), (timing.us, timing.config), key=lambda b: b[0])
    chosen: Configs = {}
    for product_class in ProductClass:
        splits = {split_k for which, split_k, _ in best if which == product_class}
        complete = [s for s in splits if all((product_class, s, bucket) in best for bucket in ROW_BUCKETS)]
        if complete:
            split_k = min(complete, key=lambda s: math.prod(best[product_class, s, b][0] for b in ROW_BUCKETS))
            chosen |= {(product_class, bucket): best[product_class, split_k, bucket][1] for bucket in ROW_BUCKETS}
    return chosen


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer."""

    norm: Tensor
    weights: dict[ProductClass, Tensor]


Step = Callable[[Tensor, LayerWeights], Tensor]


def stand_in(qkv: Tensor) -> Tensor:
    """For attention's output [T, HIDDEN]: the first numbers of qkv [T, more], contiguous and not copied."""
    return qkv.flatten()[: len(qkv) * HIDDEN].view(-1, HIDDEN)


def torch_layer(hidden: Tensor, layer: LayerWeights) -> Tensor:
    """The twin: cuBLAS and torch's kernels."""
    ops, norm, weights = TorchOps(), layer.norm, layer.weights
    qkv = ops.norm_linear(hidden, norm, EPS, weights[ProductClass.QKV])
    attended = rms_norm(stand_in(qkv), norm, EPS)
    hidden = ops.linear_add(attended, weights[ProductClass.OUT], hidden)
    inner = ops.norm_swiglu(hidden, norm, EPS, weights[ProductClass.GATE_UP])
    return ops.linear_add(inner, weights[ProductClass.DOWN], hidden)


def skinny_layer(hidden: Tensor, layer: LayerWeights, configs: Configs, pdl: bool) -> Tensor:
    """A layer's four products; a norm stands where attention would."""
    bucket, norm = rows_bucket(len(hidden)), layer.norm

    def call(which: ProductClass, x: Tensor) -> Tensor:
        config = configs[which, bucket]
        return SHAPES[which].call(x, layer.weights[which], config, norm=norm, residual=hidden, pdl=pdl)

    qkv = call(ProductClass.QKV, hidden)
    attended = linear.rms_norm(stand_in(qkv), norm, EPS, pdl=pdl)
    hidden = call(ProductClass.OUT, attended)
    return call(ProductClass.DOWN, call(ProductClass.GATE_UP, hidden))


def chain_steps(configs: Configs) -> dict[str, Step]:
    """What is compared: early starts and prefetch, on and off, more and less, and torch."""

    def step(columns: int | None, pdl: bool = True, of: Sequence[ProductClass] = tuple(ProductClass)) -> Step:
        cuts = {
            at: config if columns is None or at[0] not in of else replace(config, prefetch_columns=columns)
            for at, config in configs.items()
        }
        return lambda hidden, layer: skinny_layer(hidden, layer, cuts, pdl)

    return {
        "as tuned": step(None),
        "no prefetch": step(0),
        "no early start": step(0, pdl=False),
        "torch": torch_layer,
        "prefetch 512": step(512),
        "prefetch 1024": step(1024),
        "prefetch 2048 of out": step(2048, of=(ProductClass.OUT,)),
        "prefetch 4096 of out": step(4096, of=(ProductClass.OUT,)),
        "prefetch 256": step(256),
    }


def time_chains(configs: Configs, deadline: float) -> list[dict[str, Any]]:
    """Layers with weights of their own in one graph."""
    in_layer = [SHAPES[which] for which in ProductClass if which != ProductClass.HEAD]
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
    layers = [
        LayerWeights(norm, {s.product_class: random_weights(s.weight_rows, s.depth) for s in in_layer})
        for _ in range(NUM_LAYERS)
    ]
    layer_bytes = sum(shape.weight_bytes for shape in in_layer)
    found = []
    for (name, step), num_rows in itertools.product(chain_steps(configs).items(), ROW_COUNTS):
        if time.monotonic() > deadline:
            break
        start = torch.randn(num_rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
        try:
            us = time_us([partial(run_layers, step, start, layers)]) / NUM_LAYERS
        except Exception as error:
            log.warning("%s, %d rows: %s", name, num_rows, str(error)[:200])
            continue
        fraction = layer_bytes / us / READ_BYTES_PER_US
        found.append({"variant": name, "rows": num_rows, "us_per_layer": round(us, 2), "fraction": round(fraction, 4)})
    return found


def run_layers(step: Step, hidden: Tensor, layers: Sequence[LayerWeights]) -> Tensor:
    for layer in layers:
        hidden = step(hidden, layer)
    return hidden


def as_literal(configs: Configs) -> str:
    """Lines for `linear_configs`; what is the default is not said."""
    lines = []
    for (which, bucket), config in configs.items():
        options = [
            f"{f.name}={getattr(config, f.name)}" for f in fields(config)[2:] if getattr(config, f.name) != f.default
        ]
        cut = ", ".join((str(config.block_n), str(config.block_k), *options))
        lines.append(f"    (ProductClass.{which.name}, {bucket}): ProductConfig({cut}),")
    return "\n".join(("CONFIGS = {", *lines, "}"))


def search_all(tasks: Sequence[Task], deadline: float, keep: Callable[[Sequence[Timing]], None]) -> list[Timing]:
    """Every shape and bucket in a fair part of the time; `keep` is called with what is known so far."""
    timings: list[Timing] = []
    for left, shape in enumerate(SHAPES.values(), start=-len(SHAPES)):
        bench = ShapeBench(shape)
        for number, bucket in enumerate(ROW_BUCKETS):
            cuts = [cut for which, at, cut in tasks if (which, at) == (shape, bucket)]
            searches_left = -left * len(ROW_BUCKETS) - number
            now = time.monotonic()
            timings += search(bucket, cuts, bench, now + (deadline - now) / searches_left)
            torch.cuda.empty_cache()
            keep(timings)
    return timings


def tune(out: Path, seconds: float) -> None:
    """Compiles, searches, times chains of layers, in `seconds` together; writes `out`/linear.json, prints tables."""
    start = time.monotonic()
    tasks = all_tasks()
    runnable = compile_all(compile_one, tasks, COMPILE_SHARE * seconds)
    print(f"{len(runnable)} of {len(tasks)} cuts compiled in {time.monotonic() - start:.0f} s", flush=True)
    report: dict[str, Any] = {"environment": environment(), "gpu": torch.cuda.get_device_name()}

    def keep(timings: Sequence[Timing]) -> None:
        report["timings"] = [timing.as_json() for timing in timings]
        write_json(out / "linear.json", report)

    search_end = start + seconds * (1 - CHAIN_SHARE)
    timings = search_all(runnable, search_end, keep)
    configs = CONFIGS | picks(timings)
    print(
        best_table(timings), as_literal(configs), f"searched in {time.monotonic() - start:.0f} s", sep="\n", flush=True
    )
    chains = time_chains(configs, start + seconds)
    print(table(("variant", "rows", "us a layer", "of 4.11 TB/s"), [list(chain.values()) for chain in chains]))
    write_json(out / "linear.json", {**report, "chains": chains, "literal": as_literal(configs)})


def best_table(timings: Sequence[Timing]) -> str:
    """The two best cuts of every shape and row count, and cuBLAS."""
    rows = []
    for which, num_rows in itertools.product(ProductClass, ROW_COUNTS):
        of_shape = sorted(
            (t for t in timings if (t.product_class, t.num_rows) == (which, num_rows)), key=lambda t: t.us
        )
        cuts = [timing for timing in of_shape if timing.config][:2]
        for timing in (*cuts, *(timing for timing in of_shape if timing.config is None)):
            cut = short_name(timing.config) if timing.config else "cublas"
            rows.append((f"{which} {num_rows}", cut, f"{timing.us:.2f}", f"{timing.fraction:.3f}"))
    return table(("product, rows", "cut", "us", "of 4.11 TB/s"), rows)


def short_name(config: ProductConfig) -> str:
    parts = [f"{config.block_n}x{config.block_k} w{config.num_warps} s{config.num_stages} p{config.prefetch_columns}"]
    parts += [f"split{config.split_k}"] * (config.split_k > 1) + ["tma"] * config.tma + ["fused"] * config.fused_norm
    return " ".join(parts)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    tune(Path(sys.argv[1]), float(sys.argv[2]))
