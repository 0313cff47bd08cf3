"""Questions for the bundled model, drawn from a seed, with the answers that can be read off their pictures."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from prism_server.bench.clip_files import lossless_clip
from prism_server.demo_model import LAYOUTS, Layout, draw_sample, encode_png
from prism_server.demo_model.clips import FRAMES_PER_SECOND

QUESTIONS_PER_SAMPLE = 6
"""Several about the same pictures, so that all but the first find them cached."""
MAX_ANSWER_TOKENS = 160
"""The longest right answer, a page read out, has about 130."""

CLIP_LAYOUTS: tuple[Layout, ...] = tuple(layout for layout in LAYOUTS if layout.kind == "clip")
PICTURE_LAYOUTS: tuple[Layout, ...] = tuple(layout for layout in LAYOUTS if layout.kind != "clip")
"""All layouts but the clips, plain text among them."""


@dataclass(frozen=True, slots=True)
class Question:
    """One conversation of one turn. `pictures` are PNG files; questions of one sample share them.

    With `fps` they are the frames of one clip, which is sent as a list, or, where it is there, as the `file`.
    """

    layout: str
    task: str
    text: str
    expected: str
    pictures: tuple[bytes, ...] = field(repr=False)
    fps: float | None = None
    file: bytes | None = field(default=None, repr=False)


def draw_questions(num_questions: int, seed: int, layouts: Sequence[Layout] = PICTURE_LAYOUTS) -> list[Question]:
    """`num_questions` questions spread evenly over the layouts, those of one sample next to each other."""
    share, rest = divmod(num_questions, len(layouts))
    questions: list[Question] = []
    for index, layout in enumerate(layouts):
        endless = _questions_of(layout, random.Random(f"{seed} {layout.name}"))
        questions += (next(endless) for _ in range(share + (index < rest)))
    return questions


def _questions_of(layout: Layout, rng: random.Random) -> Iterator[Question]:
    for number in count():
        sample = draw_sample(rng, layout)
        pictures = tuple(encode_png(picture) for picture in sample.pictures)
        fps, file = None, None
        if layout.kind == "clip":
            fps = FRAMES_PER_SECOND
            file = lossless_clip(sample.pictures, fps) if number % 2 else None
        for turn in sample.turns[:QUESTIONS_PER_SAMPLE]:
            yield Question(layout.name, turn.task, turn.question, turn.answer, pictures, fps, file)
