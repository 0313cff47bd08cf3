"""M-RoPE positions: where each row stands in time, height and width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from prism_server.media.item import ItemFacts
from prism_server.prompt.encoded import MediaSpan


def merged_grid(facts: ItemFacts) -> tuple[int, int]:
    """(height, width) of one frame in rows of the prompt. Patches are merged in squares, so the facts tell the side."""
    _, h, w = facts.grid
    merge = math.isqrt(facts.num_patches // facts.num_tokens)
    if facts.num_tokens * merge**2 != facts.num_patches or h % merge or w % merge:
        raise ValueError(f"a grid of {facts.grid} patches cannot be {facts.num_tokens} tokens")
    return h // merge, w // merge


@lru_cache(maxsize=256)
def frame_cells(height: int, width: int) -> npt.NDArray[np.int32]:
    """int32 [3, height * width], read-only: where the cells of a frame stand that starts at 0, row by row."""
    cells = np.zeros((3, height * width), dtype=np.int32)
    cells[1] = np.repeat(np.arange(height, dtype=np.int32), width)
    cells[2] = np.tile(np.arange(width, dtype=np.int32), height)
    cells.setflags(write=False)
    return cells


def mrope_positions(num_tokens: int, spans: Sequence[MediaSpan]) -> tuple[npt.NDArray[np.int32], int]:
    """Positions int32 [3, num_tokens] (time, height, width), and what to add to a later row's index to get its own.

    Text advances all three by one. A frame that starts at position p stands at time p, its cells at height p + row and
    width p + column; what follows starts at p + the longer side. As `Qwen3VLModel.get_rope_index` of transformers.
    Spans are in order of rows, each one frame.
    """
    positions = np.empty((3, num_tokens), dtype=np.int32)
    row, position = 0, 0
    for span in spans:
        height, width = merged_grid(span.facts)
        if span.start < row or span.rows != height * width:
            raise ValueError(f"not a frame of {height} x {width} after row {row}: {span}")
        start = position + span.start - row
        positions[:, row : span.start] = np.arange(position, start, dtype=np.int32)
        np.add(frame_cells(height, width), start, out=positions[:, span.start : span.end])
        row, position = span.end, start + max(height, width)
    end = position + num_tokens - row
    positions[:, row:] = np.arange(position, end, dtype=np.int32)
    return positions, end - num_tokens
