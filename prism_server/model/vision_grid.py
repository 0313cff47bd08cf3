"""Where patches are: their order, their coordinates, and the learned position table stretched over them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch
from torch import Tensor

REMEMBERED_PATCHES = 1 << 14
"""Of all frame sizes that are remembered: 40 MB of an 8B model's."""


@dataclass(frozen=True, eq=False, slots=True)
class Frame:
    """What the tower adds to the patches of a frame of some size, and how it turns them; in merge-block order."""

    places: Tensor = field(repr=False)
    """[n, hidden]: the learned position table, stretched."""
    cos: Tensor = field(repr=False)
    """float32 [n, head_dim / 2]"""
    sin: Tensor = field(repr=False)

    @property
    def num_patches(self) -> int:
        return self.cos.shape[0]


class FrameTable:
    """(height, width) in patches -> Frame, on the device of `positions` [side^2, hidden]; the latest sizes are kept."""

    def __init__(self, positions: Tensor, merge: int, head_dim: int, rope_theta: float) -> None:
        self._positions, self._merge = positions, merge
        self._quarter, self._rope_theta = head_dim // 4, rope_theta
        self._kept: OrderedDict[tuple[int, int], Frame] = OrderedDict()
        self._kept_patches = 0

    def get(self, h: int, w: int) -> Frame:
        frame = self._kept.get((h, w))
        if frame is None:
            frame = self._make(h, w)
            if h * w > REMEMBERED_PATCHES:
                return frame
            self._kept[h, w] = frame
            self._kept_patches += h * w
            while self._kept_patches > REMEMBERED_PATCHES:
                _, dropped = self._kept.popitem(last=False)
                self._kept_patches -= dropped.num_patches
        self._kept.move_to_end((h, w))
        return frame

    def _make(self, h: int, w: int) -> Frame:
        """Axial rotation: row number turns the first half of the frequencies, column number the second."""
        device = self._positions.device
        exponents = torch.arange(self._quarter, dtype=torch.float32, device=device) / self._quarter
        frequencies = 1.0 / (self._rope_theta**exponents)
        places = patch_positions(h, w, self._merge, device)
        angles = (places.float().unsqueeze(2) * frequencies).flatten(1)
        return Frame(resample_table(self._positions, h, w, self._merge), angles.cos(), angles.sin())


def patch_positions(h: int, w: int, merge: int, device: torch.device) -> Tensor:
    """(row, column) of an h x w frame's patches, int64 [h * w, 2].

    Merge-block order: the merge x merge patches that become one token lie side by side, blocks row by row.
    """
    rows = torch.arange(h, device=device).view(h // merge, 1, merge, 1).expand(-1, w // merge, -1, merge)
    columns = torch.arange(w, device=device).view(1, w // merge, 1, merge).expand(h // merge, -1, merge, -1)
    return torch.stack((rows.flatten(), columns.flatten()), dim=1)


def resample_table(table: Tensor, h: int, w: int, merge: int) -> Tensor:
    """A learned square table [side^2, hidden] stretched to [h * w, hidden] in merge-block order.

    Bilinear, the table's corners on the frame's corners. Weights and sums are float32 (Hugging Face
    transformers, `get_vision_interpolation_indices_and_weights`).
    """
    side = round(table.shape[0] ** 0.5)
    places = patch_positions(h, w, merge, table.device).float()
    # Filled there: a copy from the host would wait for the device; by a host number, CUDA would multiply, not divide.
    last = torch.stack([torch.full((), max(side_length - 1, 1), device=table.device) for side_length in (h, w)])
    source = places * (side - 1) / last
    low = source.floor()
    fraction = source - low
    low_index = low.long().clamp(max=side - 1)
    high_index = (low_index + 1).clamp(max=side - 1)
    out = torch.zeros((h * w, table.shape[1]), dtype=torch.float32, device=table.device)
    for row, row_weight in ((low_index[:, 0], 1 - fraction[:, 0]), (high_index[:, 0], fraction[:, 0])):
        for column, column_weight in ((low_index[:, 1], 1 - fraction[:, 1]), (high_index[:, 1], fraction[:, 1])):
            out += table[row * side + column].float() * (row_weight * column_weight).unsqueeze(1)
    return out.to(table.dtype)
