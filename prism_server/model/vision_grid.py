"""Where patches are: their order, their coordinates, and the learned position table stretched over them."""

from __future__ import annotations

import torch
from torch import Tensor


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
    last = torch.tensor([max(h - 1, 1), max(w - 1, 1)], device=table.device)
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
