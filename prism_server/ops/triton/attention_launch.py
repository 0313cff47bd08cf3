"""Launches of the paged attention kernels for one class of sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.kernels.attention import paged_attention
from prism_server.ops.triton.kernels.attention_parts import add_pieces, unpack_pages
from prism_server.ops.triton.launch import overlapped

INTERPRETER_PROGRAMS = 2
ADDING_PROGRAMS_PER_SM = 4
ADDED_PIECES = 8
UNPACKING_PROGRAMS_PER_SM = 8
WARPGROUP_ROWS = 64
"""Tiles of so many rows have their products' factors in shared memory, smaller ones in registers, FP8 as pairs."""
NO_BOUND = (1 << 31) - 1

PRODUCT_DTYPES: dict[KVDtype, tl.dtype] = {"fp8": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}


@dataclass(frozen=True, slots=True)
class Tile:
    """How the kernel works on one class of sequences, and how their contexts are cut."""

    block_rows: int
    """Query rows times the query heads of one KV head."""
    block_tokens: int
    """Tokens of the context that are scored at once."""
    piece_tokens: int
    """The least length of a piece of a context."""
    max_pieces: int
    partial_rows: int
    """A sequence's query rows times its pieces are no more than this, unless there is one piece only."""
    num_warps: int
    num_stages: int
    programs_per_sm: int
    max_registers: int
    unpacked: bool = False
    """FP8 pages are converted once, not by every tile: for many tiles, of a number of pages that the host can bound."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Fixed addresses: captured graphs keep them."""

    sums: Tensor  # float32 [partial rows, heads, head_dim]
    stats: Tensor  # float32 [partial rows, heads, 2]
    halves: Tensor  # float16, of unpacked pages
    scales: Tensor  # float32, one for head_dim of `halves`
    max_rows: int
    max_sequences: int

    def unpacked(self, layout: PageLayout) -> tuple[Tensor, Tensor]:
        """float16 [2, page, kv_heads, page_tokens, head_dim] and float32 scales [2, page, kv_heads, page_tokens]."""
        row = layout.num_kv_heads * layout.page_tokens
        shape = (2, self.scales.numel() // (2 * row), layout.num_kv_heads, layout.page_tokens)
        count = math.prod(shape)
        halves = self.halves[: count * layout.head_dim].view(*shape, layout.head_dim)
        return halves, self.scales[:count].view(shape)


@dataclass(frozen=True, slots=True)
class Rows:
    """The sequences of one class, of `least` to `most` query rows. Of a padded batch, the numbers are bounds."""

    least: int
    most: int
    num_sequences: int
    num_rows: int
    contexts: tuple[int, ...] | None
    """None where the host does not know them."""

    @classmethod
    def of(cls, batch: AttentionBatch, least: int, most: int) -> Rows | None:
        """None without any."""
        if batch.host_query_starts is None or batch.host_context_lengths is None:
            if min(batch.max_query_rows, batch.num_rows) < least:
                return None
            return cls(least, most, min(batch.num_sequences, batch.num_rows // least), batch.num_rows, None)
        lens = zip(batch.host_query_rows, batch.host_context_lengths, strict=True)
        own = [(rows, context) for rows, context in lens if least <= rows <= most]
        if not own:
            return None
        return cls(least, most, len(own), sum(rows for rows, _ in own), tuple(context for _, context in own))

    def partial_rows(self, tile: Tile) -> int:
        """No more than this many come from them."""
        return min(self.num_sequences * tile.partial_rows, self.num_rows * tile.max_pieces)

    def pages(self, page_tokens: int, table_pages: int) -> list[int]:
        """Of each sequence, no more than this."""
        if self.contexts is None:
            return [table_pages] * self.num_sequences
        return [-(-context // page_tokens) for context in self.contexts]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Where K and V lie: payload and scales, the layer in them, pages of a layer."""

    payload: Tensor
    scales: Tensor
    layer: int
    num_pages: int
    unpacked: bool


@dataclass(frozen=True, slots=True)
class _Pages:
    """Which sequences a launch takes: by their pages, and by where these begin among the unpacked ones."""

    least: int = 0
    most: int = NO_BOUND
    begin: int = 0
    window: int = NO_BOUND


@dataclass(frozen=True, slots=True)
class Launch:
    """Attention of one class of sequences."""

    workspace: Workspace
    num_sms: int
    q: Tensor
    out: Tensor
    kv: PagedKV
    layer: int
    batch: AttentionBatch
    scale: float
    tile: Tile
    rows: Rows

    def run(self) -> None:
        """At once, or as often as unpacked pages or partial sums would fill the workspace."""
        packed = self._packed()
        if not (self._fp8 and self.tile.unpacked):
            self._run(packed, _Pages())
            return
        halves, scales = self.workspace.unpacked(self.kv.layout)
        unpacked = _Pool(halves, scales, 0, halves.shape[1], unpacked=True)
        pages = self.rows.pages(self.kv.layout.page_tokens, self.batch.block_tables.shape[1])
        if self.rows.contexts is None:  # all at once: further launches would be there in every replay of a graph
            most, last_begin = unpacked.num_pages // len(pages), 0
        else:
            most = 3 * unpacked.num_pages // 4
            last_begin = sum(count for count in pages[:-1] if count <= most)
        window = unpacked.num_pages - most + 1  # a sequence that begins in it has room
        for begin in range(0, last_begin + 1, window):
            taken = _Pages(0, most, begin, window)
            self._unpack(unpacked, taken)
            self._run(unpacked, taken)
        if max(pages) > most:
            self._run(packed, _Pages(least=most + 1))

    def _run(self, pool: _Pool, pages: _Pages) -> None:
        window = self.workspace.sums.shape[0] - self.tile.partial_rows  # a sequence that begins in it has room
        for begin in range(0, self.rows.partial_rows(self.tile) + 1, window):
            self._attend(pool, pages, begin, window)
            if self.tile.max_pieces > 1:
                self._add_pieces(pool, pages, begin, window)

    def _attend(self, pool: _Pool, pages: _Pages, window_begin: int, window_rows: int) -> None:
        tile, layout, native = self.tile, self.kv.layout, self.q.is_cuda
        most_programs = self.rows.num_rows * layout.num_kv_heads * tile.max_pieces
        paged_attention[min(self._programs(tile.programs_per_sm), most_programs),](
            self.q,
            self.out,
            pool.payload,
            pool.scales,
            *self._sequences(pages),
            self.batch.block_tables,
            self.batch.table_rows,
            self.batch.block_tables.stride(0),
            self.workspace.sums,
            self.workspace.stats,
            pool.layer,
            pool.num_pages,
            window_begin,
            window_rows,
            self.scale,
            HEADS=self.q.shape[1],
            KV_HEADS=layout.num_kv_heads,
            FP8=self._fp8,
            PRODUCT=PRODUCT_DTYPES[layout.kv_dtype] if native or self._fp8 else tl.float32,  # as its interpreter must
            BLOCK_ROWS=tile.block_rows,
            STAGES=tile.num_stages,
            NATIVE=native,
            num_warps=tile.num_warps,
            **self._cut(),
            **self._common(pool.unpacked),
            **({"maxnreg": tile.max_registers} if native else {}),
        )

    def _add_pieces(self, pool: _Pool, pages: _Pages, window_begin: int, window_rows: int) -> None:
        kv_heads = self.kv.layout.num_kv_heads
        add_pieces[min(self._programs(ADDING_PROGRAMS_PER_SM), self.rows.num_rows * kv_heads),](
            self.out,
            self.workspace.sums,
            self.workspace.stats,
            *self._sequences(pages),
            window_begin,
            window_rows,
            HEADS=self.q.shape[1],
            BLOCK_HEADS=self.q.shape[1] // kv_heads,
            BLOCK_PIECES=ADDED_PIECES,
            **self._cut(),
            **self._common(pool.unpacked),
        )

    def _unpack(self, unpacked: _Pool, pages: _Pages) -> None:
        layout, tables = self.kv.layout, self.batch.block_tables
        unpack_pages[self._programs(UNPACKING_PROGRAMS_PER_SM),](
            self.kv.payload,
            self.kv.scales,
            unpacked.payload,
            unpacked.scales,
            *self._sequences(pages),
            tables,
            self.batch.table_rows,
            tables.stride(0),
            self.layer,
            self.kv.num_pages,
            unpacked.num_pages,
            KV_HEADS=layout.num_kv_heads,
            **self._common(unpacked=True),
        )

    def _packed(self) -> _Pool:
        payload = self.kv.payload
        if self._fp8 and self.tile.block_rows < WARPGROUP_ROWS:
            payload = payload.view(torch.int16)
        scales = payload if self.kv.scales is None else self.kv.scales
        return _Pool(payload, scales, self.layer, self.kv.num_pages, unpacked=False)

    @property
    def _fp8(self) -> bool:
        return self.kv.layout.kv_dtype == "fp8"

    def _programs(self, per_sm: int) -> int:
        return self.num_sms * per_sm if self.q.is_cuda else INTERPRETER_PROGRAMS

    def _sequences(self, pages: _Pages) -> tuple[Any, ...]:
        batch = self.batch
        return (
            *(batch.query_starts, batch.context_lengths, batch.num_sequences),
            *(pages.least, pages.most, pages.begin, pages.window),
        )

    def _cut(self) -> dict[str, int]:
        return {
            "BLOCK_TOKENS": self.tile.block_tokens,
            "PIECE_TOKENS": self.tile.piece_tokens,
            "MAX_PIECES": self.tile.max_pieces,
            "PARTIAL_ROWS": self.tile.partial_rows,
        }

    def _common(self, unpacked: bool) -> dict[str, Any]:
        """What every kernel is told, and how it is launched."""
        return {
            "HEAD_DIM": self.kv.layout.head_dim,
            "PAGE_TOKENS": self.kv.layout.page_tokens,
            "UNPACKED": unpacked,
            "MAX_SEQUENCES": triton.next_power_of_2(self.workspace.max_sequences),
            "MIN_QUERY_ROWS": self.rows.least,
            "MAX_QUERY_ROWS": self.rows.most,
            **overlapped(self.q.device),
        }
