"""Tiles of paged attention that `kernels_attention` tries, compiled ahead in parallel."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Literal

import torch

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.attention import TILES, PagedAttention, Tile

Kind = Literal["few", "some", "many"]

REGISTERS_OF_SM = 65_536
SHARED_BYTES_OF_SM = 227 << 10
LENS_OF: dict[Kind, tuple[int, int]] = {"few": (1, 100), "some": (48, 100), "many": (600, 700)}
"""Query rows and context of a step that has a kind's class only."""
MAX_SEQUENCES = 64

log = logging.getLogger(__name__)

Block = tuple[int, int, int, int]
BLOCKS: dict[KVDtype, dict[Kind, tuple[Block, ...]]] = {
    "fp8": {
        "few": (
            (16, 64, 4, 3), (16, 64, 2, 3), (16, 64, 4, 2), (16, 128, 4, 2), (16, 64, 4, 4), (16, 32, 1, 4),
            (16, 128, 4, 3), (16, 64, 2, 2), (16, 64, 2, 4), (16, 32, 2, 4), (16, 64, 1, 3), (16, 128, 8, 2),
            (16, 32, 1, 3), (16, 128, 8, 3), (16, 32, 2, 3),
        ),
        "some": (
            (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 8, 3), (128, 64, 4, 3), (32, 64, 4, 3),
            (128, 64, 8, 2), (64, 32, 4, 3), (32, 64, 2, 3), (64, 128, 8, 2),
        ),
        "many": (
            (128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3),
            (64, 128, 4, 2),
        ),
    },
    "bf16": {
        "few": ((16, 64, 4, 3), (16, 64, 2, 3), (16, 32, 2, 4), (16, 64, 4, 2), (16, 32, 1, 4), (16, 64, 4, 4)),
        "some": ((64, 64, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (32, 64, 4, 3)),
        "many": ((128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 3)),
    },
    "fp32": {"few": (), "some": (), "many": ()},
}  # fmt: skip
"""Most promising first: query rows, tokens, warps, stages."""
PROGRAMS: dict[Kind, tuple[int, ...]] = {"few": (4, 3, 6, 8, 12, 2), "some": (2, 1, 3, 4), "many": (1, 2)}


@dataclass(frozen=True, slots=True)
class Candidate:
    kv_dtype: KVDtype
    kind: Kind
    tile: Tile

    @property
    def label(self) -> str:
        t = self.tile
        size = f"{t.block_rows}x{t.block_tokens} w{t.num_warps} s{t.num_stages}"
        return f"{size} p{t.programs_per_sm} r{t.max_registers} piece {t.piece_tokens}"


def candidates(kv_dtype: KVDtype, kind: Kind) -> list[Candidate]:
    """Every block with as many programs on an SM as its registers and shared memory may allow."""
    found = []
    base: Tile = getattr(TILES[kv_dtype], kind)
    for programs in PROGRAMS[kind]:
        for rows, tokens, warps, stages in BLOCKS[kv_dtype][kind]:
            registers = min(255, REGISTERS_OF_SM // (programs * warps * 32) // 8 * 8)
            token_bytes = PageLayout(1, 1, 128, 64, kv_dtype).bytes_per_token
            shared = tokens * token_bytes * max(1, stages - 1) + rows * 256
            sums = rows * (128 + 2 * tokens) // (32 * warps)
            if registers >= max(56, sums + 40) and programs * shared <= SHARED_BYTES_OF_SM:
                tile = replace(
                    base, block_rows=rows, block_tokens=tokens, num_warps=warps, num_stages=stages,
                    programs_per_sm=programs, max_registers=registers,
                )  # fmt: skip
                found.append(Candidate(kv_dtype, kind, tile))
    return found


def neighbours(best: Iterable[Candidate]) -> list[Candidate]:
    """The same with contexts cut into shorter and longer pieces."""
    return [
        replace(candidate, tile=replace(candidate.tile, piece_tokens=piece_tokens))
        for candidate in best
        for piece_tokens in (128, 512)
    ]


def compile_one(candidate: Candidate) -> str | None:
    """Fills Triton's cache on disk, in a process of its own; what is wrong with the candidate, else None."""
    try:
        layout = PageLayout(1, 8, 128, 64, candidate.kv_dtype)
        rows, context = LENS_OF[candidate.kind]
        kv = PagedKV(layout, layout.pages_for(context), "cuda")
        kv.tensors()[0].zero_()
        index = torch.zeros(rows, dtype=torch.int64, device="cuda")
        tables = torch.arange(kv.num_pages, dtype=torch.int32, device="cuda").unsqueeze(0)
        batch = AttentionBatch.exact((0, rows), (context,), tables, tables[0, :1] * 0, index, index)
        attend = PagedAttention(
            {candidate.kv_dtype: replace(TILES[candidate.kv_dtype], **{candidate.kind: candidate.tile})}
        )
        attend.reserve(1024, MAX_SEQUENCES, 32, 8, 128, "cuda")
        attend(torch.zeros((rows, 32, 128), dtype=torch.bfloat16, device="cuda"), kv, 0, batch, 1.0)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


def compile_all(tried: Sequence[Candidate], seconds: float) -> list[Candidate]:
    """Compiles in parallel until the time is over; those that are known to run, in their order."""
    runnable = set()
    workers = max(1, (os.cpu_count() or 2) - 2)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures = {pool.submit(compile_one, candidate): candidate for candidate in tried}
    try:
        for future in as_completed(futures, timeout=seconds):
            wrong = str(future.exception()) if future.exception() else future.result()
            if wrong is None:
                runnable.add(futures[future])
            else:
                log.warning("left out %s %s: %s", futures[future].kv_dtype, futures[future].label, wrong)
    except TimeoutError:
        log.warning("%d of %d candidates compiled in %.0f s", len(runnable), len(tried), seconds)
    pool.shutdown(cancel_futures=True)
    return [candidate for candidate in tried if candidate in runnable]
