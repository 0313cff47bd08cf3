"""Launches of the paged attention kernel: which tile takes which sequences, and the room that partial sums need."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.kernels.attention import paged_attention
from prism_server.ops.triton.launch import overlapped

WORKSPACE_BYTES = 256 << 20
INTERPRETER_PROGRAMS = 2
MAX_SPLIT_QUERY_ROWS = 512
"""Longer prefills have tiles enough to fill a GPU: their contexts are not cut."""

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


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tile for a few rows (decodes), for some (the suffix behind a cached prefix), and for many (cold prefill)."""

    few: Tile
    some: Tile
    many: Tile


TILES: dict[KVDtype, Tiles] = {
    "fp8": Tiles(
        few=Tile(16, 64, 256, 64, 64, 4, 3, 4, 128),
        some=Tile(64, 64, 256, 8, MAX_SPLIT_QUERY_ROWS, 4, 3, 2, 255),
        many=Tile(128, 64, 1 << 30, 1, 1, 8, 3, 1, 255),
    ),
    "bf16": Tiles(
        few=Tile(16, 64, 256, 64, 64, 4, 3, 3, 128),
        some=Tile(64, 64, 256, 8, MAX_SPLIT_QUERY_ROWS, 4, 3, 2, 255),
        many=Tile(128, 64, 1 << 30, 1, 1, 8, 3, 1, 255),
    ),
    "fp32": Tiles(
        few=Tile(16, 32, 256, 64, 64, 4, 2, 2, 255),
        some=Tile(32, 32, 256, 8, MAX_SPLIT_QUERY_ROWS, 4, 2, 2, 255),
        many=Tile(32, 32, 1 << 30, 1, 1, 4, 2, 2, 255),
    ),
}


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Fixed addresses: captured graphs keep them."""

    sums: Tensor  # float32 [partial rows, heads, head_dim]
    stats: Tensor  # float32 [partial rows, heads, 2]
    arrivals: Tensor  # int32 [max_rows, kv_heads], zero between launches
    max_sequences: int

    @property
    def partial_rows(self) -> int:
        return self.sums.shape[0]


class PagedAttention:
    """Causal attention over a page pool, for one shape of heads. Called by the thread that owns the device."""

    def __init__(self, tiles: dict[KVDtype, Tiles] | None = None) -> None:
        self._tiles = tiles or TILES
        self._workspace: _Workspace | None = None
        self._num_sms = 0

    def reserve(
        self, max_rows: int, max_sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> None:
        """Allocate the workspace, at most 256 MiB and a counter per row and KV head. ValueError for odd shapes."""
        group = heads // kv_heads
        if heads % kv_heads or group & (group - 1) or group > min(self._smallest_tile()):
            raise ValueError(f"{heads} query heads over {kv_heads} KV heads: a power of two up to 16 must share each")
        if head_dim < 32 or head_dim & (head_dim - 1):
            raise ValueError(f"head_dim {head_dim} is not a power of two of at least 32")
        most = max(tile.partial_rows for tiles in self._tiles.values() for tile in (tiles.few, tiles.some))
        row_bytes = heads * (head_dim + 2) * 4
        partial_rows = max(2 * most, min(WORKSPACE_BYTES // row_bytes, max_sequences * most))
        self._workspace = _Workspace(
            torch.empty((partial_rows, heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((partial_rows, heads, 2), dtype=torch.float32, device=device),
            torch.zeros((max_rows, kv_heads), dtype=torch.int32, device=device),
            max_sequences,
        )
        native = self._workspace.sums.is_cuda
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if native else 0

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        """q [T, heads, head_dim], contiguous -> [T, heads * head_dim]; rows of no sequence mean nothing."""
        if self._workspace is None or not q.is_contiguous():
            raise ValueError("paged attention needs reserve() first, and contiguous queries")
        max_rows = self._workspace.arrivals.shape[0]
        if q.shape[0] > max_rows or batch.num_sequences > self._workspace.max_sequences:
            raise ValueError(
                f"{q.shape[0]} rows of {batch.num_sequences} sequences, but room was reserved for {max_rows} of "
                f"{self._workspace.max_sequences}"
            )
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        group = q.shape[1] // kv.layout.num_kv_heads
        tiles = self._tiles[kv.layout.kv_dtype]
        few = tiles.few.block_rows // group
        for tile, least, most in (
            (tiles.few, 1, few),
            (tiles.some, few + 1, MAX_SPLIT_QUERY_ROWS),
            (tiles.many, MAX_SPLIT_QUERY_ROWS + 1, 1 << 30),
        ):
            bound = _partial_rows_bound(batch, tile, least, most)
            if bound is not None:
                self._launch(q, out, kv, layer, batch, scale, tile, (least, most), bound)
        return out

    def _launch(
        self,
        q: Tensor,
        out: Tensor,
        kv: PagedKV,
        layer: int,
        batch: AttentionBatch,
        scale: float,
        tile: Tile,
        query_rows: tuple[int, int],
        partial_rows_bound: int,
    ) -> None:
        """Once, or as often as the partial sums would fill the workspace."""
        workspace = self._workspace
        assert workspace is not None
        layout = kv.layout
        native = q.is_cuda
        fp8 = layout.kv_dtype == "fp8"
        payload = kv.payload.view(torch.int16) if fp8 else kv.payload
        options = {"maxnreg": tile.max_registers, **overlapped(q.device)} if native else {"PDL": False}
        programs = self._num_sms * tile.programs_per_sm if native else INTERPRETER_PROGRAMS
        programs = min(programs, batch.num_rows * layout.num_kv_heads * tile.max_pieces)
        window_rows = workspace.partial_rows - tile.partial_rows
        for window in range(partial_rows_bound // window_rows + 1):
            paged_attention[programs,](
                q,
                out,
                payload,
                kv.scales if kv.scales is not None else payload,
                batch.query_starts,
                batch.context_lengths,
                batch.block_tables,
                batch.table_rows,
                workspace.sums,
                workspace.stats,
                workspace.arrivals,
                batch.num_sequences,
                batch.block_tables.stride(0),
                layer,
                kv.num_pages,
                window * window_rows,
                window_rows,
                scale,
                HEADS=q.shape[1],
                KV_HEADS=layout.num_kv_heads,
                HEAD_DIM=layout.head_dim,
                PAGE_TOKENS=layout.page_tokens,
                FP8=fp8,
                PRODUCT=PRODUCT_DTYPES[layout.kv_dtype] if native or fp8 else tl.float32,  # as its interpreter must
                MAX_SEQUENCES=triton.next_power_of_2(workspace.max_sequences),
                MIN_QUERY_ROWS=query_rows[0],
                MAX_QUERY_ROWS=query_rows[1],
                BLOCK_ROWS=tile.block_rows,
                BLOCK_TOKENS=tile.block_tokens,
                PIECE_TOKENS=tile.piece_tokens,
                MAX_PIECES=tile.max_pieces,
                PARTIAL_ROWS=tile.partial_rows,
                STAGES=tile.num_stages,
                NATIVE=native,
                num_warps=tile.num_warps,
                **options,
            )

    def _smallest_tile(self) -> list[int]:
        return [tiles.few.block_rows for tiles in self._tiles.values()]


def _partial_rows_bound(batch: AttentionBatch, tile: Tile, least: int, most: int) -> int | None:
    """No more partial rows than this come from the batch's sequences of `least` to `most` rows; None without any."""
    if batch.host_query_starts is None:
        if batch.max_query_rows < least:
            return None
        return min(batch.num_sequences * tile.partial_rows, batch.num_rows * tile.max_pieces)
    rows = [count for begin, end in pairwise(batch.host_query_starts) if least <= (count := end - begin) <= most]
    return min(len(rows) * tile.partial_rows, sum(rows) * tile.max_pieces) if rows else None
