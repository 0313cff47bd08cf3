"""Batches of fixed shape. Few pictures are drawn for one, and much is asked about them.

Drawing an invoice takes longer than writing its questions, and encoding it takes a good part of a training step. So
a batch holds fewer pictures than its rows show: each stands in several rows, in other company and with other
questions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from prism_server.demo_model.clips import Clip, draw_clip
from prism_server.demo_model.layouts import TEMPORAL_PATCH, Layout, Slot
from prism_server.demo_model.pages import Page, draw_page
from prism_server.demo_model.samples import (
    CLIP_TURNS,
    JPEG_SHARE,
    PAGE_TURNS,
    SCENE_TURNS,
    TEXT_TURNS,
    Media,
    ask,
    jpeg_copy,
)
from prism_server.demo_model.scenes import Scene, draw_scene
from prism_server.demo_model.training.prompts import PromptWriter, row_length
from prism_server.demo_model.turns import Turn, distinct

USES_ALONE, USES_IN_COMPANY = 2, 4
"""Rows that a picture is shown in, when a row shows one and when it shows several."""
SYSTEM_SHARE = 0.2
"""Of the rows: begin with a system prompt."""
TURNS = {"scene": SCENE_TURNS, "pages": PAGE_TURNS, "clip": CLIP_TURNS, "text": TEXT_TURNS}

Bytes = npt.NDArray[np.uint8]
Medium = TypeVar("Medium", Scene, Page, Clip)


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """B rows of one layout. `sizes` of a layout are its different slots, in order of appearance."""

    layout: Layout
    ids: Tensor = field(repr=False)
    """int64 [B, length]"""
    targets: Tensor = field(repr=False)
    """int64 [B, length]: the answer's token that follows, or `NOTHING_ASKED`."""
    positions: Tensor = field(repr=False)
    """int64 [3, B, length]"""
    media_rows: Tensor = field(repr=False)
    """int64 [B, vision tokens], indices into all B * length rows."""
    shown: Tensor = field(repr=False)
    """int64 [B, slots]: which of the pictures of its size each slot shows."""
    pictures: tuple[Tensor, ...] = field(repr=False)
    """A size: uint8 [P, 1 or 2 frames, height, width, 3]."""
    cells: tuple[Tensor, ...] = field(repr=False)
    """A size: what lies in each token of each picture, uint8 [P, tokens, glyphs] of pages, int64 [P, tokens, 2] (colour
    and shape) of scenes. Nothing of clips."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            self.layout,
            ids=change(self.ids),
            targets=change(self.targets),
            positions=change(self.positions),
            media_rows=change(self.media_rows),
            shown=change(self.shown),
            pictures=tuple(map(change, self.pictures)),
            cells=tuple(map(change, self.cells)),
        )

    def pin_memory(self) -> Batch:
        """Called by the loader, so that copies to the GPU need not wait."""
        return self.map(Tensor.pin_memory)

    def tensors(self) -> list[Tensor]:
        return [self.ids, self.targets, self.positions, self.media_rows, self.shown, *self.pictures, *self.cells]

    def fill(self, other: Batch) -> None:
        """Overwrite with `other`, of the same shapes, where it lies."""
        for own, new in zip(self.tensors(), other.tensors(), strict=True):
            own.copy_(new, non_blocking=True)


@dataclass(frozen=True, eq=False, slots=True)
class Asked:
    """What a batch's targets answer: turn_of int64 [B, length] (-1: nothing) and each row's tasks, in order."""

    turn_of: Tensor = field(repr=False)
    tasks: list[list[str]] = field(repr=False)


@dataclass(frozen=True, eq=False, slots=True)
class Shelf:
    """Media of one size to choose from; medium n is the `frames_each` entries of `pixels` from n * frames_each on."""

    media: Sequence[Scene | Page | Clip] = field(repr=False)
    pixels: Bytes = field(repr=False)
    cells: npt.NDArray[np.uint8] | npt.NDArray[np.int64] | None = field(repr=False)
    frames_each: int = 1


def sizes_of(layout: Layout) -> tuple[Slot, ...]:
    return tuple(dict.fromkeys(layout.slots))


def num_rows(layout: Layout, batch_tokens: int) -> int:
    """Rows of the layout that make about `batch_tokens` tokens; at least two."""
    return max(2, batch_tokens // row_length(layout))


def draw_batch(
    rng: random.Random, writer: PromptWriter, layout: Layout, rows: int, task_weights: Mapping[str, float]
) -> tuple[Batch, Asked]:
    """The batch that `rng` gives: `rows` conversations about pictures drawn for it."""
    shelves = {size: _fill_shelf(rng, layout, size, rows) for size in sizes_of(layout)}
    shown, written, tasks, systems = [], [], [], []
    for _ in range(rows):
        media, entries = _choose(rng, layout, shelves)
        turns = draw_turns(rng, media, TURNS[layout.kind], task_weights)
        systems.append(rng.random() < SYSTEM_SHARE)
        row = writer.row(layout, systems[-1], turns)
        written.append(row)
        shown.append(entries)
        tasks.append([turn.task for turn in turns[: row.num_turns]])
    openings = [writer.opening(layout, with_system) for with_system in systems]
    starts = np.arange(rows)[:, None] * row_length(layout)
    batch = Batch(
        layout=layout,
        ids=torch.from_numpy(np.stack([row.ids for row in written])),
        targets=torch.from_numpy(np.stack([row.targets for row in written])),
        positions=torch.from_numpy(np.stack([opening.positions for opening in openings], 1)),
        media_rows=torch.from_numpy(np.stack([opening.media_rows for opening in openings]) + starts),
        shown=torch.tensor(shown, dtype=torch.int64).view(rows, len(layout.slots)),
        pictures=tuple(torch.from_numpy(shelf.pixels) for shelf in shelves.values()),
        cells=tuple(torch.from_numpy(shelf.cells) for shelf in shelves.values() if shelf.cells is not None),
    )
    return batch, Asked(torch.from_numpy(np.stack([row.turn_of for row in written])), tasks)


def draw_turns(rng: random.Random, media: Media, count: int, weights: Mapping[str, float]) -> tuple[Turn, ...]:
    """Up to `count` different questions; of what the generator asks, a kind is kept in proportion to its weight."""
    heaviest = max(1.0, *weights.values()) if weights else 1.0

    def turn() -> Turn:
        while rng.random() * heaviest > weights.get((asked := ask(rng, media)).task, 1.0):
            pass
        return asked

    return distinct(turn() for _ in range(count))


def _fill_shelf(rng: random.Random, layout: Layout, size: Slot, rows: int) -> Shelf:
    if layout.kind == "clip":
        clips = [draw_clip(rng, layout.slots) for _ in range(max(1, rows // USES_ALONE))]
        frames = np.stack([np.asarray(frame) for clip in clips for frame in clip.frames])
        return Shelf(clips, frames.reshape(-1, TEMPORAL_PATCH, *frames.shape[1:]), None, len(layout.slots))
    a_row = layout.slots.count(size)
    uses = USES_ALONE if len(layout.slots) == 1 else USES_IN_COMPANY
    count = max(a_row, math.ceil(rows * a_row / uses))
    if layout.kind == "scene":
        scenes = [draw_scene(rng, size) for _ in range(count)]
        marks = np.stack([scene.mark_cells() for scene in scenes]).reshape(count, size.num_tokens, -1)
        return Shelf(scenes, _pixels(rng, [scene.image for scene in scenes]), marks)
    pages = [draw_page(rng, size) for _ in range(count)]
    glyphs = np.stack([page.glyph_cells() for page in pages]).astype(np.uint8).reshape(count, size.num_tokens, -1)
    return Shelf(pages, _pixels(rng, [page.image for page in pages]), glyphs)


def _pixels(rng: random.Random, images: Sequence[Image.Image]) -> Bytes:
    """uint8 [P, 1, height, width, 3]; some as they look after JPEG."""
    sent = (jpeg_copy(rng, image) if rng.random() < JPEG_SHARE else image for image in images)
    return np.stack([np.asarray(image) for image in sent])[:, None]


def _choose(rng: random.Random, layout: Layout, shelves: Mapping[Slot, Shelf]) -> tuple[Media, list[int]]:
    """What a row shows: the media, and for each slot an index into the pixels of its size."""
    if layout.kind == "clip":
        (shelf,) = shelves.values()
        number = rng.randrange(len(shelf.media))
        first = number * shelf.frames_each
        (clip,) = _only(Clip, shelf.media[number : number + 1])
        return (clip,), list(range(first, first + shelf.frames_each))
    picks = {
        size: iter(rng.sample(range(len(shelf.media)), layout.slots.count(size))) for size, shelf in shelves.items()
    }
    entries = [next(picks[slot]) for slot in layout.slots]
    media = [shelves[slot].media[entry] for slot, entry in zip(layout.slots, entries, strict=True)]
    return (_only(Scene, media) if layout.kind == "scene" else _only(Page, media)), entries


def _only(kind: type[Medium], media: Sequence[Scene | Page | Clip]) -> tuple[Medium, ...]:
    return tuple(medium for medium in media if isinstance(medium, kind))
