"""Pictures of a few coloured shapes on a 3 x 3 grid, and questions about them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from prism_server.demo_model.drawing import COLOR_NAMES, COLORS, GROUNDS, SHAPES, draw_shape, jittered
from prism_server.demo_model.layouts import CELL, Slot
from prism_server.demo_model.turns import Turn

PLURALS = {shape: f"{shape}s" for shape in SHAPES} | {"cross": "crosses"}
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")


class Shape(NamedTuple):
    """A thing in a scene; `cell` counts the grid row by row, 0 to 8."""

    color: str
    shape: str
    cell: int

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    @property
    def place(self) -> str:
        row, column = ROWS[self.cell // 3], COLUMNS[self.cell % 3]
        return "center" if (row, column) == ("middle", "center") else f"{row} {column}"


class Mark(NamedTuple):
    """Where a shape was drawn, in pixels; `color` and `shape` count from 1, 0 is for nothing. A label for training."""

    x: float
    y: float
    radius: float
    color: int
    shape: int


@dataclass(frozen=True, slots=True)
class Scene:
    """Up to six shapes, in the order of their cells."""

    slot: Slot
    shapes: tuple[Shape, ...]
    marks: tuple[Mark, ...] = field(repr=False)
    image: Image.Image = field(repr=False)

    def mark_cells(self) -> npt.NDArray[np.int64]:
        """What lies in each vision token: int64 [rows, columns, 2], colour and shape counted from 1, 0 for nothing."""
        cells = np.zeros((self.slot.rows, self.slot.columns, 2), np.int64)
        x, y = np.arange(self.slot.columns) * CELL + CELL // 2, np.arange(self.slot.rows) * CELL + CELL // 2
        for mark in self.marks:
            reach = max(mark.radius, CELL // 2 + 1)
            cells[np.ix_(abs(y - mark.y) < reach, abs(x - mark.x) < reach)] = (mark.color, mark.shape)
        return cells

    def description(self) -> str:
        parts = [f"a {shape.name} at the {shape.place}" for shape in self.shapes]
        return (parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}") + "."

    def turn(self, rng: random.Random, where: str = "") -> Turn:
        """A question; `where` ("" or " in picture 2") says which of several pictures is meant."""
        (ask,) = rng.choices(QUESTIONS, QUESTION_WEIGHTS)
        return ask(self, rng, where) or _ask_total(self, rng, where)

    def single(self, rng: random.Random, key: Callable[[Shape], Hashable]) -> Shape | None:
        """A shape that no other equals in `key`, so that a question can name it by that."""
        seen = Counter(key(shape) for shape in self.shapes)
        single = [shape for shape in self.shapes if seen[key(shape)] == 1]
        return rng.choice(single) if single else None


def draw_scene(rng: random.Random, slot: Slot) -> Scene:
    """A scene as large as `slot`: mostly different shapes, sometimes several of one to be counted."""
    shapes = tuple(sorted(_choose_shapes(rng), key=lambda shape: shape.cell))
    ground = rng.choice(GROUNDS)
    image = Image.new("RGB", (slot.width, slot.height), (ground, ground, ground))
    draw = ImageDraw.Draw(image)
    marks = []
    cell_width, cell_height = slot.width / 3, slot.height / 3
    for color, shape, cell in shapes:
        radius = min(cell_width, cell_height) * rng.uniform(0.32, 0.46)
        x = (cell % 3 + 0.5) * cell_width + rng.uniform(-1, 1) * (cell_width / 2 - radius) * 0.9
        y = (cell // 3 + 0.5) * cell_height + rng.uniform(-1, 1) * (cell_height / 2 - radius) * 0.9
        draw_shape(draw, shape, x, y, radius, jittered(rng, COLORS[color]))
        marks.append(Mark(x, y, radius, 1 + COLOR_NAMES.index(color), 1 + SHAPES.index(shape)))
    return Scene(slot, shapes, tuple(marks), image)


def _choose_shapes(rng: random.Random) -> list[Shape]:
    count = rng.choice([1, 1, 2, 2, 3, 4, 5, 6])
    cells = rng.sample(range(9), 9)
    if rng.random() < 0.35:
        common = rng.choice(SHAPES)
        return [
            Shape(rng.choice(COLOR_NAMES), common if rng.random() < 0.8 else rng.choice(SHAPES), cell)
            for cell in cells[:count]
        ]
    count = min(count, 4)
    colors, shapes = rng.sample(COLOR_NAMES, count), rng.sample(SHAPES, count)
    return [Shape(*thing) for thing in zip(colors, shapes, cells[:count], strict=True)]


def _ask_color(scene: Scene, rng: random.Random, where: str) -> Turn | None:
    if (asked := scene.single(rng, lambda shape: shape.shape)) is None:
        return None
    wordings = (f"What color is the {asked.shape}{where}?", f"Which color does the {asked.shape}{where} have?")
    return Turn("color", rng.choice(wordings), asked.color)


def _ask_shape(scene: Scene, rng: random.Random, where: str) -> Turn | None:
    if (asked := scene.single(rng, lambda shape: shape.color)) is None:
        return None
    return Turn("shape", f"Which shape{where} is {asked.color}?", asked.shape)


def _ask_count(scene: Scene, rng: random.Random, where: str) -> Turn:
    shape = rng.choice(scene.shapes).shape if rng.random() < 0.85 else rng.choice(SHAPES)
    count = sum(thing.shape == shape for thing in scene.shapes)
    return Turn("count", f"How many {PLURALS[shape]} are there{where}?", str(count))


def _ask_place(scene: Scene, rng: random.Random, where: str) -> Turn | None:
    if (asked := scene.single(rng, lambda shape: shape.name)) is None:
        return None
    return Turn("where", f"Where is the {asked.name}{where}?", asked.place)


def _ask_presence(scene: Scene, rng: random.Random, where: str) -> Turn:
    seen = rng.choice(scene.shapes)
    name = seen.name
    if rng.random() >= 0.5:
        other_color = rng.random() < 0.5
        name = f"{rng.choice(COLOR_NAMES)} {seen.shape}" if other_color else f"{seen.color} {rng.choice(SHAPES)}"
    present = any(shape.name == name for shape in scene.shapes)
    return Turn("yesno", f"Is there a {name}{where}?", "yes" if present else "no")


def _ask_description(scene: Scene, rng: random.Random, where: str) -> Turn:
    wording = rng.choice(["Describe the picture", "Describe what you see"])
    return Turn("describe", f"{wording}{where}.", scene.description())


def _ask_total(scene: Scene, rng: random.Random, where: str) -> Turn:
    return Turn("total", f"How many objects are there{where}?", str(len(scene.shapes)))


Question = Callable[[Scene, random.Random, str], Turn | None]

QUESTIONS: tuple[Question, ...] = (
    _ask_color,
    _ask_shape,
    _ask_count,
    _ask_place,
    _ask_presence,
    _ask_description,
    _ask_total,
)
QUESTION_WEIGHTS = (4, 3, 3, 5, 2, 2, 1)
