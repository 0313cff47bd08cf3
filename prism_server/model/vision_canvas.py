"""Fixed buffers for the vision tower's blocks: a graph that works on them serves every batch of its size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prism_server.model.config import VisionConfig
from prism_server.model.vision_grid import Frame
from prism_server.ops.interface import SEGMENT_TILE_ROWS, segment_tiles

LEAST_SEGMENTS = 8
"""Of a small window; larger ones have room for a frame of 128 patches after the other. Room costs programs."""
PATCHES_PER_SEGMENT = 128
MAX_SEGMENTS = 128

Grid = tuple[int, int, int]
"""An item's frames, and the height and width of each in patches."""


@dataclass(frozen=True, eq=False, slots=True)
class CanvasWindow:
    """The first n patches of a canvas."""

    hidden: Tensor = field(repr=False)
    """[n, hidden]: the batch's states, then those of padding; blocks work on it in place."""
    cos: Tensor = field(repr=False)
    """float32 [n, head_dim / 2]"""
    sin: Tensor = field(repr=False)
    tiles: Tensor = field(repr=False)
    """int32 [T, 3], as in `Ops.packed_attention`."""
    levels: Tensor = field(repr=False)
    """[levels, n / merge^2, out_hidden]: what the mergers make, by their blocks' order, the main features last."""

    @property
    def num_patches(self) -> int:
        return self.hidden.shape[0]

    @property
    def max_segments(self) -> int:
        """Frames: each may leave the last of its tiles unfilled."""
        return self.tiles.shape[0] - self.num_patches // SEGMENT_TILE_ROWS


class VisionCanvas:
    """Buffers for batches of up to so many patches, whose addresses never change. One batch at a time."""

    def __init__(self, num_patches: int, config: VisionConfig, dtype: torch.dtype, device: torch.device) -> None:
        if num_patches % config.merge_size**2:
            raise ValueError(f"{num_patches} patches are no whole number of tokens")
        self._merged = config.merge_size**2
        levels = 1 + len(config.deepstack_blocks)
        self._hidden = torch.zeros((num_patches, config.hidden_size), dtype=dtype, device=device)
        self._angles = torch.zeros((2, num_patches, config.head_dim // 2), dtype=torch.float32, device=device)
        most_tiles = num_patches // SEGMENT_TILE_ROWS + MAX_SEGMENTS
        self._tiles = torch.zeros((most_tiles, 3), dtype=torch.int32, device=device)
        shape = (levels, num_patches // self._merged, config.out_hidden_size)
        self._levels = torch.zeros(shape, dtype=dtype, device=device)
        self._shown: tuple[Grid, ...] = ()

    def window(self, num_patches: int) -> CanvasWindow:
        """The part for batches of up to so many, which is at most all."""
        segments = min(max(num_patches // PATCHES_PER_SEGMENT, LEAST_SEGMENTS), MAX_SEGMENTS)
        cos, sin = self._angles[:, :num_patches]
        return CanvasWindow(
            self._hidden[:num_patches],
            cos,
            sin,
            self._tiles[: num_patches // SEGMENT_TILE_ROWS + segments],
            self._levels[:, : num_patches // self._merged],
        )

    def show(self, grids: tuple[Grid, ...], frames: Sequence[Frame]) -> None:
        """Write down where the frames of a batch of items lie and how they are turned: once for batches alike.

        The same for every window that the batch fits into.
        """
        if grids == self._shown:
            return
        num_patches = sum(frame.num_patches for frame in frames)
        torch.cat([frame.cos for frame in frames], out=self._angles[0, :num_patches])
        torch.cat([frame.sin for frame in frames], out=self._angles[1, :num_patches])
        rows = segment_tiles([frame.num_patches for frame in frames])
        rows += [(0, 0, 0)] * (self._tiles.shape[0] - len(rows))
        # From pinned memory: a plain copy would wait until the device has done all its work.
        tiles = torch.tensor(rows, dtype=torch.int32, pin_memory=self._tiles.is_cuda)
        self._tiles.copy_(tiles, non_blocking=True)
        self._shown = grids


@dataclass(frozen=True, eq=False, slots=True)
class PaddedBlocks:
    """A way to run blocks [first, last) of the tower, mergers among them, on a window of a canvas."""

    canvas: VisionCanvas = field(repr=False)
    window: CanvasWindow
    run: Callable[[int, int], None] = field(repr=False)
    """Called with first and last."""
