"""What a sample shows: how many pictures, pages or frames, and of which size. The model was trained on these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CELL = 32
"""Pixels on a side of what one vision token covers: a patch of 16, merged 2 x 2."""
TEMPORAL_PATCH = 2
"""Frames that one slot of a clip holds."""

Kind = Literal["scene", "pages", "clip", "text"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one picture, or for one pair of frames of a clip. Pixels, multiples of `CELL`."""

    width: int
    height: int

    def __post_init__(self) -> None:
        if self.width < CELL or self.height < CELL or self.width % CELL or self.height % CELL:
            raise ValueError(f"a slot's sides are multiples of {CELL} pixels, not {self.width} x {self.height}")

    @property
    def columns(self) -> int:
        return self.width // CELL

    @property
    def rows(self) -> int:
        return self.height // CELL

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Layout:
    """`weight` is how often it is drawn in training; `text_tokens` is the room for all that is no vision token."""

    name: str
    kind: Kind
    slots: tuple[Slot, ...]
    text_tokens: int
    weight: int

    @property
    def vision_tokens(self) -> int:
        return sum(slot.num_tokens for slot in self.slots)


def _layout(name: str, kind: Kind, sizes: Sequence[tuple[int, int]], text_tokens: int, weight: int) -> Layout:
    return Layout(name, kind, tuple(Slot(width, height) for width, height in sizes), text_tokens, weight)


LAYOUTS: tuple[Layout, ...] = (
    _layout("scene-96", "scene", [(96, 96)], 128, 4),
    _layout("scene-128x160", "scene", [(128, 160)], 128, 3),
    _layout("scene-192", "scene", [(192, 192)], 128, 3),
    _layout("scene-160x96", "scene", [(160, 96)], 128, 3),
    _layout("scene-256x192", "scene", [(256, 192)], 128, 3),
    _layout("scene-64", "scene", [(64, 64)], 128, 1),
    _layout("scenes-2", "scene", [(96, 96)] * 2, 144, 5),
    _layout("scenes-2-mixed", "scene", [(128, 96), (96, 160)], 144, 4),
    _layout("scenes-3", "scene", [(96, 96), (128, 128), (96, 96)], 144, 4),
    _layout("scenes-4", "scene", [(96, 96)] * 4, 144, 4),
    _layout("page-224x288", "pages", [(224, 288)], 288, 5),
    _layout("page-256x320", "pages", [(256, 320)], 288, 5),
    _layout("page-288x352", "pages", [(288, 352)], 288, 4),
    _layout("page-256x384", "pages", [(256, 384)], 288, 4),
    _layout("pages-2", "pages", [(256, 320)] * 2, 288, 6),
    _layout("pages-2-mixed", "pages", [(224, 288), (256, 320)], 288, 5),
    _layout("pages-4", "pages", [(256, 320)] * 4, 288, 7),
    _layout("pages-8", "pages", [(256, 320)] * 8, 288, 6),
    _layout("clip-4", "clip", [(96, 96)] * 2, 160, 1),
    _layout("clip-8", "clip", [(96, 96)] * 4, 208, 1),
    _layout("clip-12", "clip", [(128, 96)] * 6, 256, 1),
    _layout("text", "text", [], 96, 1),
)

LAYOUT_BY_NAME: dict[str, Layout] = {layout.name: layout for layout in LAYOUTS}
