"""Paged attention: which tile takes which sequences, and the room that the kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype
from prism_server.ops.interface import AttentionBatch
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.attention_launch import Launch, Rows, Tile, Workspace

if TYPE_CHECKING:
    from prism_server.ops.cuda.decode_attention import DecodeAttention

WORKSPACE_BYTES = 256 << 20
"""Half of it for partial sums, half for unpacked pages."""
MAX_SPLIT_QUERY_ROWS = 256
"""Longer prefills have tiles enough to fill a GPU: their contexts are not cut."""
MAX_SPLIT_PARTIAL_ROWS = 512


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tile for a few rows (decodes), for some (the suffix behind a cached prefix), and for many (cold prefill)."""

    few: Tile
    some: Tile
    many: Tile


TILES: dict[KVDtype, Tiles] = {
    "fp8": Tiles(
        few=Tile(16, 64, 256, 64, 64, 4, 3, 4, 128),
        some=Tile(64, 64, 256, 8, MAX_SPLIT_PARTIAL_ROWS, 4, 3, 2, 255),
        many=Tile(64, 64, 1 << 30, 1, 1, 4, 3, 2, 255, unpacked=True),
    ),
    "bf16": Tiles(
        few=Tile(16, 64, 512, 64, 64, 4, 3, 3, 168),
        some=Tile(64, 64, 256, 8, MAX_SPLIT_PARTIAL_ROWS, 4, 3, 2, 255),
        many=Tile(64, 64, 1 << 30, 1, 1, 4, 3, 2, 255),
    ),
    "fp32": Tiles(
        few=Tile(16, 32, 256, 64, 64, 4, 2, 2, 255),
        some=Tile(32, 32, 256, 8, MAX_SPLIT_PARTIAL_ROWS, 4, 2, 2, 255),
        many=Tile(32, 32, 1 << 30, 1, 1, 4, 2, 2, 255),
    ),
}


class PagedAttention:
    """Causal attention over a page pool, for one shape of heads. Called by the thread that owns the device."""

    def __init__(self, tiles: dict[KVDtype, Tiles] | None = None) -> None:
        self._tiles = tiles or TILES
        self._workspace: Workspace | None = None
        self._num_sms = 0
        self._decode: DecodeAttention | None = None

    def reserve(
        self, max_rows: int, max_sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device | str
    ) -> None:
        """Allocate the workspace, at most 256 MiB. ValueError for odd shapes."""
        group = heads // kv_heads
        if heads % kv_heads or group & (group - 1) or group > min(self._smallest_tile()):
            raise ValueError(f"{heads} query heads over {kv_heads} KV heads: a power of two up to 16 must share each")
        if head_dim < 32 or head_dim & (head_dim - 1):
            raise ValueError(f"head_dim {head_dim} is not a power of two of at least 32")
        most = max(tile.partial_rows for tiles in self._tiles.values() for tile in (tiles.few, tiles.some))
        row_bytes = heads * (head_dim + 2) * 4
        partial_rows = max(2 * most, min(WORKSPACE_BYTES // 2 // row_bytes, max_sequences * most))
        unpacked_rows = WORKSPACE_BYTES // 2 // (head_dim * 2 + 4) if "fp8" in self._tiles else 0
        self._workspace = Workspace(
            torch.empty((partial_rows, heads, head_dim), dtype=torch.float32, device=device),
            torch.empty((partial_rows, heads, 2), dtype=torch.float32, device=device),
            torch.empty(unpacked_rows * head_dim, dtype=torch.float16, device=device),
            torch.empty(unpacked_rows, dtype=torch.float32, device=device),
            max_rows,
            max_sequences,
        )
        native = self._workspace.sums.is_cuda
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if native else 0

    def __call__(self, q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        """q [T, heads, head_dim], contiguous -> [T, heads * head_dim]; rows of no sequence mean nothing."""
        if self._workspace is None or not q.is_contiguous():
            raise ValueError("paged attention needs reserve() first, and contiguous queries")
        max_rows = self._workspace.max_rows
        if q.shape[0] > max_rows or batch.num_sequences > self._workspace.max_sequences:
            raise ValueError(
                f"{q.shape[0]} rows of {batch.num_sequences} sequences, but room was reserved for {max_rows} of "
                f"{self._workspace.max_sequences}"
            )
        out = q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))
        least = 1
        if (decode := self._decode_for(q, kv, self._workspace)) is not None:
            least = 2
            if batch.host_query_starts is None or 1 in batch.host_query_rows:
                decode(q, kv, layer, batch, scale, out)
        tiles = self._tiles[kv.layout.kv_dtype]
        few = tiles.few.block_rows * kv.layout.num_kv_heads // q.shape[1]
        for tile, fewest, most in (
            (tiles.few, least, few),
            (tiles.some, few + 1, MAX_SPLIT_QUERY_ROWS),
            (tiles.many, MAX_SPLIT_QUERY_ROWS + 1, 1 << 30),
        ):
            rows = Rows.of(batch, fewest, most)
            if rows is not None:
                Launch(self._workspace, self._num_sms, q, out, kv, layer, batch, scale, tile, rows).run()
        return out

    def _decode_for(self, q: Tensor, kv: PagedKV, room: Workspace) -> DecodeAttention | None:
        """The kernel of its own that single rows have, where it knows heads, pages and GPU, and has as much room."""
        if not q.is_cuda or q.dtype != torch.bfloat16:
            return None
        from prism_server.ops.cuda.decode_attention import DecodeAttention, has_room, serves  # needs NVIDIA's libraries

        if not (serves(kv.layout, q.shape[1], q.device) and has_room(room.max_rows, room.max_sequences)):
            return None
        if self._decode is None:
            self._decode = DecodeAttention(q.shape[1], kv.layout.num_kv_heads, q.device)
        return self._decode

    def _smallest_tile(self) -> list[int]:
        return [tiles.few.block_rows for tiles in self._tiles.values()]
