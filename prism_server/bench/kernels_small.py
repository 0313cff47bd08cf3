"""What stands between the products and attention, at the shapes of Qwen3-VL-8B, beside plain torch.

Norm, rotation and store; token choice; copies and moves of pages; the vision tower's rotation and attention; the
products of many rows. Logits are not rotated: a step's choice reads them from the L2, where its head left them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.bench.kernel_timing import KernelTiming, Thunk, graph_us
from prism_server.capacity.page_layout import PageLayout
from prism_server.ops import AttentionBatch, HostPages, Ops, PagedKV, make_ops
from prism_server.ops.torch_ops import TorchOps

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB = 36, 32, 8, 128, 4096, 12_288, 151_936
LAYOUT = PageLayout(LAYERS, KV_HEADS, HEAD_DIM)
NUM_PAGES = 256
VISION_HEADS, VISION_HEAD_DIM = 16, 72
PICTURES, PATCHES = 8, 784
"""Row A of the benchmarks: eight pictures of 448 x 448."""
MOVED_PAGES = 16
TWIN = "torch"

Measurement = Callable[[Ops], KernelTiming]


def measure(seconds: float) -> list[KernelTiming]:
    """All of them, as far as the time goes."""
    deadline = time.monotonic() + seconds
    ops = make_ops("triton", "cuda")
    found = []
    for measurement in _measurements():
        if time.monotonic() < deadline:
            found.append(measurement(ops))
            torch.cuda.empty_cache()
    return found


def _measurements() -> Iterator[Measurement]:
    for rows in (1, 8, 64, 512, 8192):
        yield partial(_store, rows=rows)
    for rows in (1, 8, 64):
        yield partial(_argmax, rows=rows)
    for rows in (1, 8, 64):
        for flat in (False, True):
            yield partial(_draw, rows=rows, flat=flat)
    yield _copy_rows
    yield partial(_move_pages, out=True)
    yield partial(_move_pages, out=False)
    yield _rotate
    for padded in (VISION_HEAD_DIM, 80, 128):
        yield partial(_segments, head_dim=padded)
    for rows in (512, 8192):
        yield partial(_swiglu_product, rows=rows)
        yield partial(_residual_product, rows=rows)


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def _both(thunks: Callable[[Ops], list[Thunk]], ops: Ops) -> tuple[float, float]:
    return graph_us(thunks(ops)), graph_us(thunks(TorchOps()), repeats=5)


def _store(ops: Ops, rows: int) -> KernelTiming:
    kv = PagedKV(LAYOUT, NUM_PAGES, "cuda")
    places = torch.randperm(NUM_PAGES * LAYOUT.page_tokens, device="cuda")[:rows]
    table = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    pages, slots = places // LAYOUT.page_tokens, places % LAYOUT.page_tokens
    batch = AttentionBatch.exact((0, rows), (rows,), table, table[0], pages, slots)
    inputs = [_normal(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM) for _ in range(LAYERS if rows <= 512 else 4)]
    norm, angle = _normal(HEAD_DIM), _normal(rows, HEAD_DIM // 2, dtype=torch.float32)

    def thunks(backend: Ops) -> list[Thunk]:
        def one(layer: int, qkv: Tensor) -> Thunk:
            return lambda: backend.qk_norm_rope_store(qkv, norm, norm, 1e-6, angle, angle, kv, layer, batch)

        return [one(layer, qkv) for layer, qkv in enumerate(islice(cycle(inputs), LAYERS))]

    us, twin_us = _both(thunks, ops)
    moved = inputs[0].nbytes + rows * HEADS * HEAD_DIM * 2 + 2 * angle.nbytes + rows * LAYOUT.bytes_per_token // LAYERS
    return KernelTiming.of("norm, rotation, store", f"{rows} rows, fp8", us, moved, TWIN, twin_us)


def _logits(rows: int, flat: bool) -> Tensor:
    """Flat as of random weights, or with fifty tokens far above the others, as of a trained model."""
    logits = _normal(rows, VOCAB, dtype=torch.float32)
    if not flat:
        logits[:, ::3000] += torch.linspace(16, 6, 51, device="cuda")
    return logits


def _argmax(ops: Ops, rows: int) -> KernelTiming:
    logits = _logits(rows, flat=False)

    def thunks(backend: Ops) -> list[Thunk]:
        return [lambda: backend.argmax(logits)] * 20

    return KernelTiming.of("best token", f"{rows} x {VOCAB}", *_with_twin(thunks, ops))


def _draw(ops: Ops, rows: int, flat: bool) -> KernelTiming:
    logits = _logits(rows, flat)
    top_k = VOCAB if flat else 20
    settings = torch.tensor([[0.7, top_k, 0.8, 0.0, 0.5]], dtype=torch.float64, device="cuda").repeat(rows, 1)
    settings[:, 4] = torch.rand(rows, dtype=torch.float64, device="cuda")

    us = graph_us([lambda: ops.draw(logits, settings)] * 5)
    twin_us = _eager_us(lambda: TorchOps().draw(logits, settings), repeats=5)
    shape = f"{rows} x {VOCAB}, {'flat, top-p' if flat else 'peaked, top-k 20, top-p'}"
    return KernelTiming.of("random token", shape, us, 0, TWIN, twin_us)


def _with_twin(thunks: Callable[[Ops], list[Thunk]], ops: Ops, moved: int = 0) -> tuple[float, int, str, float]:
    us, twin_us = _both(thunks, ops)
    return us, moved, TWIN, twin_us


def _copy_rows(ops: Ops) -> KernelTiming:
    """Not in a graph: its list comes from the host."""
    kv = PagedKV(LAYOUT, NUM_PAGES, "cuda")
    copies = list(range(8)), list(range(8, 16)), [48] * 8
    us, twin_us = (_eager_us(partial(backend.copy_rows, kv, *copies)) for backend in (ops, TorchOps()))
    return KernelTiming.of("copies of rows", "8 pages, 48 rows, launch included", us, 0, TWIN, twin_us)


def _move_pages(_: Ops, out: bool) -> KernelTiming:
    """Until the last byte is there; the twin copies straight to memory that is not page-locked."""
    kv = PagedKV(LAYOUT, NUM_PAGES, "cuda")
    pages = list(range(0, 2 * MOVED_PAGES, 2))
    slots = list(reversed(range(MOVED_PAGES)))

    def mover(host: HostPages) -> Thunk:
        return (lambda: host.swap_out(kv, pages, slots)) if out else (lambda: host.swap_in(kv, slots, pages))

    us, twin_us = (_eager_us(mover(HostPages(LAYOUT, MOVED_PAGES, pinned)), repeats=5) for pinned in (True, False))
    name = "pages to the host" if out else "pages from the host"
    gigabytes_per_s = MOVED_PAGES * LAYOUT.page_bytes / us / 1e3
    shape = f"{MOVED_PAGES} of {LAYOUT.page_bytes} bytes: {gigabytes_per_s:.1f} GB/s"
    return KernelTiming.of(name, shape, us, 0, "pageable memory", twin_us)


def _eager_us(work: Thunk, repeats: int = 20) -> float:
    """Median by the host's clock, waiting for the device each time."""
    times_s = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times_s.append(time.perf_counter() - begin_s)
    return 1e6 * statistics.median(times_s[2:])


def _vision_rows() -> Tensor:
    return _normal(PICTURES * PATCHES, 3 * VISION_HEADS, VISION_HEAD_DIM)


def _rotate(ops: Ops) -> KernelTiming:
    inputs = [_vision_rows()[:, : 2 * VISION_HEADS] for _ in range(5)]
    angle = _normal(PICTURES * PATCHES, VISION_HEAD_DIM // 2, dtype=torch.float32)

    def thunks(backend: Ops) -> list[Thunk]:
        return [partial(backend.rotate, x, angle, angle) for x in inputs * 4]

    moved = 2 * inputs[0].numel() * 2 + 2 * angle.nbytes
    return KernelTiming.of("rotation in the tower", f"{PICTURES} pictures", *_with_twin(thunks, ops, moved))


def _segments(ops: Ops, head_dim: int) -> KernelTiming:
    """`head_dim` above 72: Q, K and V padded with zeros, the padding included."""
    qkv = _vision_rows()
    lengths, scale = [PATCHES] * PICTURES, VISION_HEAD_DIM**-0.5

    def thunks(backend: Ops) -> list[Thunk]:
        wanted = head_dim if backend is ops else VISION_HEAD_DIM

        def one() -> Tensor:
            x = F.pad(qkv, (0, wanted - VISION_HEAD_DIM)) if wanted > VISION_HEAD_DIM else qkv
            q, k, v = x.chunk(3, dim=1)
            return backend.segment_attention(q, k, v, lengths, scale)

        return [one] * 10

    shape = f"{PICTURES} pictures, head_dim {VISION_HEAD_DIM} as {head_dim}"
    return KernelTiming.of("attention in the tower", shape, *_with_twin(thunks, ops))


def _swiglu_product(ops: Ops, rows: int) -> KernelTiming:
    x, norm, weight = _normal(rows, HIDDEN), _normal(HIDDEN), _normal(2 * MLP, HIDDEN)

    def thunks(backend: Ops) -> list[Thunk]:
        return [lambda: backend.norm_swiglu(x, norm, 1e-6, weight)] * 5

    shape = f"{rows} x {HIDDEN} -> 2 x {MLP}"
    return KernelTiming.of("norm, product, SwiGLU", shape, *_with_twin(thunks, ops))


def _residual_product(ops: Ops, rows: int) -> KernelTiming:
    x, weight, residual = _normal(rows, MLP), _normal(HIDDEN, MLP), _normal(rows, HIDDEN)

    def thunks(backend: Ops) -> list[Thunk]:
        return [lambda: backend.linear_add(x, weight, residual)] * 5

    return KernelTiming.of("product, residual", f"{rows} x {MLP} -> {HIDDEN}", *_with_twin(thunks, ops))
