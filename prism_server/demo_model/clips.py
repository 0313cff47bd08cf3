"""Short clips, two frames a second: one shape moves, and in some of them another appears later."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from PIL import Image, ImageDraw

from prism_server.demo_model.drawing import COLOR_NAMES, COLORS, GROUNDS, RGB, SHAPES, draw_shape, jittered
from prism_server.demo_model.layouts import TEMPORAL_PATCH, Slot
from prism_server.demo_model.turns import Turn

FRAMES_PER_SECOND = 2.0

STEPS: dict[str, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "nowhere": (0, 0)}
TASKS = ("way", "what", "when", "second", "clip")


@dataclass(frozen=True, slots=True)
class LateShape:
    """A shape that appears with the pair of frames number `pair` (not 0) and stays."""

    color: str
    shape: str
    pair: int

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"


@dataclass(frozen=True, slots=True)
class Clip:
    """`frames` are 1 / `FRAMES_PER_SECOND` s apart, two to a slot; `times_s` is the middle of each pair, in seconds."""

    color: str
    shape: str
    way: str
    late: LateShape | None
    frames: tuple[Image.Image, ...] = field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    @property
    def times_s(self) -> tuple[float, ...]:
        pairs = len(self.frames) // TEMPORAL_PATCH
        return tuple((TEMPORAL_PATCH * pair + 0.5) / FRAMES_PER_SECOND for pair in range(pairs))

    def appearance(self, late: LateShape) -> str:
        return f"at {self.times_s[late.pair]:.1f} seconds"

    def description(self) -> str:
        move = "stays where it is" if self.way == "nowhere" else f"moves {self.way}"
        later = f", and {self.appearance(self.late)} a {self.late.name} appears" if self.late else ""
        return f"a {self.name} {move}{later}."

    def turn(self, rng: random.Random) -> Turn:
        task = rng.choice(TASKS)
        if task == "way":
            wordings = (f"Which way does the {self.shape} move?", f"Where does the {self.name} move?")
            return Turn(task, rng.choice(wordings), "it does not move" if self.way == "nowhere" else self.way)
        if task == "what":
            return Turn(task, "Which shape is there from the start?", f"a {self.name}")
        if task == "second":
            return Turn(task, "Does something appear later?", f"yes, a {self.late.name}" if self.late else "no")
        if task == "when" and self.late:
            return Turn(task, f"When does the {self.late.shape} appear?", self.appearance(self.late))
        return Turn("clip", rng.choice(["What happens in the video?", "Describe the video."]), self.description())


def draw_clip(rng: random.Random, slots: tuple[Slot, ...]) -> Clip:
    """A clip of `TEMPORAL_PATCH` frames for each of at least two equal slots."""
    if len(slots) < 2 or len(set(slots)) > 1:
        raise ValueError(f"a clip needs at least two slots of one size, not {slots}")
    color, shape = rng.choice(COLOR_NAMES), rng.choice(SHAPES)
    way = rng.choice(list(STEPS))
    late = _choose_late_shape(rng, color, shape, len(slots)) if rng.random() < 0.6 else None
    return Clip(color, shape, way, late, _draw_frames(rng, slots, color, shape, way, late))


def _choose_late_shape(rng: random.Random, color: str, shape: str, pairs: int) -> LateShape:
    other_color = rng.choice([name for name in COLOR_NAMES if name != color])
    other_shape = rng.choice([name for name in SHAPES if name != shape])
    return LateShape(other_color, other_shape, rng.randrange(1, pairs))


def _draw_frames(
    rng: random.Random, slots: tuple[Slot, ...], color: str, shape: str, way: str, late: LateShape | None
) -> tuple[Image.Image, ...]:
    """The moving shape crosses the picture; the late one stands in a corner away from its path."""
    width, height = slots[0].width, slots[0].height
    ground = rng.choice(GROUNDS)
    radius = min(width, height) * rng.uniform(0.13, 0.17)
    fill = jittered(rng, COLORS[color])
    late_fill: RGB = jittered(rng, COLORS[late.color]) if late else fill
    step_x, step_y = STEPS[way]
    start_x, span_x = _path(rng, width, radius, step_x)
    start_y, span_y = _path(rng, height, radius, step_y)
    corner_x = radius + 3 if start_x > width / 2 else width - radius - 3
    corner_y = radius + 3 if start_y > height / 2 else height - radius - 3
    count = TEMPORAL_PATCH * len(slots)
    frames = []
    for number in range(count):
        image = Image.new("RGB", (width, height), (ground, ground, ground))
        draw = ImageDraw.Draw(image)
        if late and number >= TEMPORAL_PATCH * late.pair:
            draw_shape(draw, late.shape, corner_x, corner_y, radius * 0.9, late_fill)
        done = number / (count - 1)
        draw_shape(draw, shape, start_x + span_x * done, start_y + span_y * done, radius, fill)
        frames.append(image)
    return tuple(frames)


def _path(rng: random.Random, side: int, radius: float, step: int) -> tuple[float, float]:
    """Start and signed way along one side, in pixels; anywhere and no way when `step` is 0."""
    low, high = radius + 2, side - radius - 2
    if not step:
        return rng.uniform(low, high), 0.0
    return (low if step > 0 else high), step * (side - 2 * radius - 4) * 0.95
