"""Pixels on their way to the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from prism_server.engine.transfers import staged
from prism_server.media.item import Patches
from prism_server.model.vision import Features


@dataclass(frozen=True, eq=False, slots=True)
class StagedItem:
    """An item's pixels on the host, from where the device can copy, and their grid; `runs` int64, as in `Patches`."""

    pixels: Tensor = field(repr=False)
    grid: tuple[int, int, int]
    runs: Tensor | None = field(repr=False)

    @classmethod
    def of(cls, patches: Patches, device: torch.device) -> StagedItem:
        """A copy: the cache's own array is shared and read-only. For any thread; takes none of the device's time."""
        runs = None if patches.runs is None else staged(patches.runs.astype(np.int64), device)
        return cls(staged(patches.pixels, device), patches.stored_grid, runs)

    def with_repeats(self, features: Features) -> Features:
        """The features of all temporal patches, from those that were encoded."""
        if self.runs is None:
            return features
        runs = self.runs.to(features.main.device, non_blocking=True)

        def whole(level: Tensor) -> Tensor:
            return level.view(self.grid[0], -1, level.shape[1])[runs].flatten(0, 1)

        return Features(whole(features.main), tuple(map(whole, features.deepstack)))
