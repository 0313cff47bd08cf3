"""Paged attention on a GPU: decodes, suffixes behind a cached prefix, both in one step, and prefill, per KV type.

Every launch reads another layer of a pool far beyond the L2. FlashInfer is the twin where it can be imported.
`python -m prism_server.bench.kernels_attention OUT SECONDS` tries candidates for the tiles of `ops.triton.attention`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism_server.bench.attention_candidates import Candidate, Kind, candidates, compile_one
from prism_server.bench.compile_ahead import compile_all
from prism_server.bench.kernel_timing import KernelTiming, Thunk, graph_us
from prism_server.bench.report import environment, table, write_json
from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.attention import TILES, PagedAttention, Tiles

HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 32, 8, 128, 64
NUM_LAYERS = 36
MAX_ROWS, MAX_SEQUENCES = 8192, 64
SCALE = HEAD_DIM**-0.5
READ_BYTES_PER_US = 4.11e6
COMPILE_SHARE = 0.35
"""Of the seconds given to a search, for compiling its candidates."""
NUM_BEST = 4
KV_DTYPES: dict[KVDtype, float] = {"fp8": 0.7, "bf16": 0.95}
KINDS: dict[Kind, float] = {"some": 0.6, "many": 0.6, "few": 0.9}
"""What is searched, in this order, and each one's share of the time that is left."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """A step: query rows and context of every sequence."""

    name: str
    lens: tuple[tuple[int, int], ...]
    num_launches: int = NUM_LAYERS
    repeats: int = 12

    @property
    def num_pages(self) -> int:
        return sum(-(-context // PAGE_TOKENS) for _, context in self.lens)

    def read_bytes(self, layout: PageLayout) -> int:
        """Of K and V, in one layer."""
        return sum(context for _, context in self.lens) * layout.bytes_per_token // layout.num_layers

    @property
    def flops(self) -> float:
        """Of the two products."""
        return sum(4.0 * HEADS * HEAD_DIM * rows * (context - (rows - 1) / 2) for rows, context in self.lens)


DECODES = [Work(f"decode, batch {batch}, context 2048", ((1, 2048),) * batch) for batch in (1, 8, 32, 64)]
SUFFIXES = [Work(f"suffix 48 over 1632, batch {batch}", ((48, 1680),) * batch) for batch in (1, 8)]
PREFILLS = [
    Work("prefill 1587", ((1587, 1587),), 12, 6),
    Work("chunk 2048 over 8192", ((2048, 10240),), 6, 4),
]
MIXED = Work("30 decodes of 2048 and 2 suffixes", ((1, 2048),) * 30 + ((48, 1680),) * 2)
WORKS_OF: dict[Kind, list[Work]] = {"few": DECODES, "some": SUFFIXES, "many": PREFILLS}
GOALS_US = {DECODES[0]: 8.0, DECODES[1]: 15.0, DECODES[2]: 44.0, DECODES[3]: 90.0, SUFFIXES[0]: 20.0, SUFFIXES[1]: 86.0}
ALL_WORKS = (*DECODES, *SUFFIXES, MIXED, *PREFILLS)


class AttentionBench:
    """A pool of 36 layers with random contents, and steps over it."""

    def __init__(self, kv_dtype: KVDtype) -> None:
        self.layout = PageLayout(NUM_LAYERS, KV_HEADS, HEAD_DIM, PAGE_TOKENS, kv_dtype)
        self.kv = random_pool(self.layout, max(work.num_pages for work in ALL_WORKS))
        self._order = torch.randperm(self.kv.num_pages, device="cuda").int()

    def batch(self, work: Work) -> AttentionBatch:
        counts = [-(-context // PAGE_TOKENS) for _, context in work.lens]
        tables = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device="cuda")
        for row, own in zip(tables, torch.split(self._order[: sum(counts)], counts), strict=True):
            row[: len(own)] = own
        starts = [0]
        for rows, _ in work.lens:
            starts.append(starts[-1] + rows)
        unused = torch.zeros(starts[-1], dtype=torch.int64, device="cuda")  # where rows are stored
        order = torch.arange(len(work.lens), dtype=torch.int32, device="cuda")
        contexts = tuple(context for _, context in work.lens)
        return AttentionBatch.exact(tuple(starts), contexts, tables, order, unused, unused)

    def us(self, work: Work, tiles: Tiles) -> float:
        attend = PagedAttention({self.layout.kv_dtype: tiles})
        attend.reserve(MAX_ROWS, MAX_SEQUENCES, HEADS, KV_HEADS, HEAD_DIM, "cuda")
        batch, q = self.batch(work), queries(work)
        return graph_us([self._launch(attend, q, layer, batch) for layer in range(work.num_launches)], work.repeats)

    def flashinfer_us(self, work: Work) -> float:
        """0 where it is not there or cannot do it."""
        if importlib.util.find_spec("flashinfer") is None:
            return 0.0
        try:
            return graph_us(flashinfer_thunks(self.kv, work, self.batch(work)), work.repeats)
        except Exception as error:
            log.warning("FlashInfer, %s, %s: %s", self.layout.kv_dtype, work.name, str(error)[:300])
            return 0.0

    def _launch(self, attend: PagedAttention, q: Tensor, layer: int, batch: AttentionBatch) -> Thunk:
        return lambda: attend(q, self.kv, layer, batch, SCALE)


def measure(seconds: float) -> list[KernelTiming]:
    """All steps of all KV types, as far as the time goes."""
    deadline = time.monotonic() + seconds
    found = []
    for kv_dtype in KV_DTYPES:
        bench = AttentionBench(kv_dtype)
        for work in ALL_WORKS:
            if time.monotonic() < deadline:
                name, moved = f"paged attention, {kv_dtype}", work.read_bytes(bench.layout)
                us, twin_us = bench.us(work, TILES[kv_dtype]), bench.flashinfer_us(work)
                bounded_by_bytes = work in DECODES
                twin = ("FlashInfer", twin_us) if twin_us else ("", 0.0)
                found.append(KernelTiming.of(name, work.name, us, moved if bounded_by_bytes else 0, *twin))
        del bench
        torch.cuda.empty_cache()
    return found


def random_pool(layout: PageLayout, num_pages: int) -> PagedKV:
    """Random bytes that are numbers below two; random scales near 1/64."""
    kv = PagedKV(layout, num_pages, "cuda")
    raw, *scales = kv.tensors()
    for layer in raw:
        layer.random_(0, 256).bitwise_and_(0xBF) if layout.has_scales else layer.normal_()
    for scale in scales:
        scale.uniform_(0.5 / 64, 1.5 / 64)
    return kv


def queries(work: Work) -> Tensor:
    rows = sum(rows for rows, _ in work.lens)
    return torch.randn((rows, HEADS, HEAD_DIM), dtype=torch.bfloat16, device="cuda")


def flashinfer_thunks(kv: PagedKV, work: Work, batch: AttentionBatch) -> list[Thunk]:
    """Its paged prefill wrapper, which takes decodes too, planned once."""
    import flashinfer

    contexts = batch.context_lengths.cpu()
    pages = (contexts + PAGE_TOKENS - 1) // PAGE_TOKENS
    indices = torch.cat([table[:count] for table, count in zip(batch.block_tables, pages.tolist(), strict=True)])
    indptr = torch.cat((torch.zeros(1, dtype=torch.int32), pages.cumsum(0).int())).cuda()
    last = ((contexts - 1) % PAGE_TOKENS + 1).int().cuda()
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    options: dict[str, Any] = {"q_data_type": torch.bfloat16, "kv_data_type": kv.payload.dtype}
    options |= {"use_token_head_sf": True} if kv.scales is not None else {}
    sizes = (HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS)
    if all(rows == 1 for rows, _ in work.lens):
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *sizes, **options)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(batch.query_starts, indptr, indices, last, *sizes, causal=True, **options)
    q = queries(work)

    def launch(layer: int) -> Thunk:
        pool = (kv.payload[layer, 0], kv.payload[layer, 1])
        if kv.scales is None:
            return lambda: wrapper.run(q, pool)
        scales = (kv.scales[layer, 0].transpose(1, 2), kv.scales[layer, 1].transpose(1, 2))
        return lambda: wrapper.run(q, pool, kv_cache_sf=scales)

    return [launch(layer) for layer in range(work.num_launches)]


@dataclass(frozen=True, slots=True)
class Timing:
    """One candidate's time for one step; `candidate` is None for FlashInfer."""

    kv_dtype: KVDtype
    candidate: Candidate | None
    work: Work
    us: float
    read_bytes: int

    def as_json(self) -> dict[str, Any]:
        return {
            "kv": self.kv_dtype,
            "kind": self.candidate.kind if self.candidate else "flashinfer",
            "tile": asdict(self.candidate.tile) if self.candidate else None,
            "work": self.work.name,
            "us": round(self.us, 2),
            "TB/s": round(self.read_bytes / self.us / 1e6, 3),
            "TFLOP/s": round(self.work.flops / self.us / 1e6, 1),
        }


class Search:
    """Times candidates of one KV type; those that fail are logged and left out."""

    def __init__(self, kv_dtype: KVDtype, keep: Callable[[Timing], None]) -> None:
        self._bench = AttentionBench(kv_dtype)
        self._kv_dtype = kv_dtype
        self._keep = keep
        self._us: dict[tuple[Candidate, Work], float] = {}

    def run(self, kind: Kind, runnable: Sequence[Candidate], deadline: float) -> list[Candidate]:
        """All at the hardest and the easiest step, the best ones at all; best first."""
        works = WORKS_OF[kind]
        ends = [works[-1], works[0]]
        for candidate in runnable:
            for work in ends:
                if time.monotonic() < deadline:
                    self.time(candidate, work)
        best = self._sorted(runnable, ends)[: 2 * NUM_BEST]
        for candidate in best:
            for work in works:
                self.time(candidate, work)
        return self._sorted(best, works)

    def time(self, candidate: Candidate, work: Work) -> None:
        if (candidate, work) in self._us:
            return
        try:
            us = self._bench.us(work, replace(TILES[self._kv_dtype], **{candidate.kind: candidate.tile}))
        except Exception as error:
            log.warning("%s, %s: %s", candidate, work.name, str(error)[:200])
            return
        self._us[candidate, work] = us
        self._keep(Timing(self._kv_dtype, candidate, work, us, work.read_bytes(self._bench.layout)))

    def twins(self, deadline: float) -> None:
        for work in ALL_WORKS:
            if time.monotonic() < deadline and (us := self._bench.flashinfer_us(work)):
                self._keep(Timing(self._kv_dtype, None, work, us, work.read_bytes(self._bench.layout)))

    def mixed(self, best: dict[Kind, Candidate]) -> float:
        tiles = replace(TILES[self._kv_dtype], **{kind: candidate.tile for kind, candidate in best.items()})
        return self._bench.us(MIXED, tiles)

    def cells(self, candidate: Candidate) -> list[str]:
        works = WORKS_OF[candidate.kind]
        return [f"{self._us[candidate, work]:.1f}" if (candidate, work) in self._us else "-" for work in works]

    def _sorted(self, choice: Sequence[Candidate], works: Sequence[Work]) -> list[Candidate]:
        def cost(candidate: Candidate) -> float:
            return sum(self._us.get((candidate, work), 1e9) / GOALS_US.get(work, 1e3) for work in works)

        return sorted(choice, key=cost)


def tune(out: Path, seconds: float) -> None:
    """Writes every timing to OUT/attention.json and prints the best tiles of each kind."""
    start = time.monotonic()
    timings: list[Timing] = []

    def keep(timing: Timing) -> None:
        timings.append(timing)

    def save() -> None:
        listed = [timing.as_json() for timing in timings]
        write_json(out / "attention.json", {"environment": environment(), "timings": listed})

    everything = [c for kv_dtype in KV_DTYPES for kind in KINDS for c in candidates(kv_dtype, kind)]
    runnable = compile_all(compile_one, everything, COMPILE_SHARE * seconds)
    print(f"{len(runnable)} of {len(everything)} candidates compiled in {time.monotonic() - start:.0f} s", flush=True)
    for kv_dtype, share in KV_DTYPES.items():
        deadline = time.monotonic() + share * (start + seconds - time.monotonic())
        search = Search(kv_dtype, keep)
        search.twins(deadline - 0.7 * (deadline - time.monotonic()))
        best: dict[Kind, Candidate] = {}
        for kind, part in KINDS.items():
            end = time.monotonic() + part * (deadline - time.monotonic())
            found = search.run(kind, [c for c in runnable if (c.kv_dtype, c.kind) == (kv_dtype, kind)], end)
            rows = [[candidate.label, *search.cells(candidate)] for candidate in found[: 2 * NUM_BEST]]
            print(table((f"{kv_dtype} {kind}", *(work.name for work in WORKS_OF[kind])), rows), flush=True)
            best |= {kind: found[0]} if found else {}
            save()
        print(f"{kv_dtype}, {MIXED.name}: {search.mixed(best):.1f} us", flush=True)
        del search
        torch.cuda.empty_cache()
    twins = [[t.kv_dtype, t.work.name, f"{t.us:.1f}"] for t in timings if t.candidate is None]
    print(table(("FlashInfer", "work", "us"), twins))
    save()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    tune(Path(sys.argv[1]), float(sys.argv[2]))
