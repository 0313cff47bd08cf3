"""Tiles of paged attention that `kernels_attention` tries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.attention import TILES, PagedAttention
from prism_server.ops.triton.attention_launch import Tile

Kind = Literal["few", "some", "many"]

REGISTERS_OF_SM = 65_536
LENS_OF: dict[Kind, tuple[int, int]] = {"few": (1, 1000), "some": (48, 1000), "many": (600, 700)}
"""Query rows and context of a step that has a kind's class only."""
MAX_SEQUENCES = 64

Block = tuple[int, int, int, int, int, int, bool]
UNCUT = 1 << 30
BLOCKS: dict[KVDtype, dict[Kind, tuple[Block, ...]]] = {
    "fp8": {
        "many": (
            (64, 64, 4, 3, 2, UNCUT, True), (64, 64, 4, 2, 2, UNCUT, True), (128, 64, 8, 3, 1, UNCUT, True),
            (128, 64, 8, 2, 1, UNCUT, True), (64, 64, 4, 3, 2, UNCUT, False), (128, 64, 8, 3, 1, UNCUT, False),
        ),
        "some": (
            (64, 64, 4, 3, 2, 512, False), (64, 64, 4, 3, 2, 256, False), (64, 64, 4, 3, 2, 512, True),
            (64, 64, 4, 3, 2, 256, True), (64, 64, 4, 2, 3, 256, False), (64, 64, 4, 2, 3, 512, False),
            (128, 64, 8, 3, 1, 256, False), (128, 64, 8, 3, 1, 512, False), (64, 32, 4, 3, 3, 256, False),
            (32, 64, 4, 3, 3, 256, False), (32, 64, 4, 3, 3, 512, False), (64, 128, 4, 2, 2, 512, False),
            (256, 32, 8, 3, 1, 128, False), (128, 64, 8, 3, 1, 256, True),
        ),
        "few": ((16, 64, 4, 3, 4, 256, False), (16, 64, 4, 3, 3, 256, False), (16, 64, 2, 3, 6, 256, False),
                (16, 64, 4, 3, 4, 512, False)),
    },
    "bf16": {
        "many": ((64, 64, 4, 3, 2, UNCUT, False), (128, 64, 8, 3, 1, UNCUT, False), (64, 64, 4, 2, 2, UNCUT, False)),
        "some": (
            (64, 64, 4, 3, 2, 512, False), (64, 64, 4, 3, 2, 256, False), (64, 64, 4, 2, 3, 256, False),
            (128, 64, 8, 3, 1, 512, False), (64, 32, 4, 3, 3, 256, False),
        ),
        "few": (
            (16, 64, 4, 3, 3, 512, False), (16, 64, 4, 3, 3, 256, False), (16, 64, 4, 2, 4, 256, False),
            (16, 32, 2, 4, 4, 256, False), (16, 64, 4, 4, 2, 512, False),
        ),
    },
    "fp32": {"few": (), "some": (), "many": ()},
}  # fmt: skip
"""Query rows, tokens, warps, stages, programs on an SM, tokens of a piece, unpacked."""


@dataclass(frozen=True, slots=True)
class Candidate:
    kv_dtype: KVDtype
    kind: Kind
    tile: Tile

    def __str__(self) -> str:
        return f"{self.kv_dtype} {self.label}"

    @property
    def label(self) -> str:
        t = self.tile
        size = f"{t.block_rows}x{t.block_tokens} w{t.num_warps} s{t.num_stages}"
        piece = "uncut" if t.piece_tokens == UNCUT else f"piece {t.piece_tokens}"
        return f"{size} p{t.programs_per_sm} r{t.max_registers} {piece}{' unpacked' if t.unpacked else ''}"


def candidates(kv_dtype: KVDtype, kind: Kind) -> list[Candidate]:
    """With as many registers as so many programs on an SM leave."""
    base: Tile = getattr(TILES[kv_dtype], kind)
    return [
        Candidate(
            kv_dtype,
            kind,
            replace(
                base, block_rows=rows, block_tokens=tokens, num_warps=warps, num_stages=stages, piece_tokens=piece,
                programs_per_sm=programs, unpacked=unpacked,
                max_registers=min(255, REGISTERS_OF_SM // (programs * warps * 32) // 8 * 8),
            ),
        )
        for rows, tokens, warps, stages, programs, piece, unpacked in BLOCKS[kv_dtype][kind]
    ]  # fmt: skip


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
