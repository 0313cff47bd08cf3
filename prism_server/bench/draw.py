"""`prism-bench draw`: pictures that the bundled model can read, as files, with questions and their answers."""

from __future__ import annotations

import random
from pathlib import Path

from prism_server.bench.report import write_json
from prism_server.demo_model import Layout, draw_sample, encode_png
from prism_server.errors import StartupError


def draw_to(directory: Path, layout: Layout, seed: int) -> list[Path]:
    """Writes `picture-1.png` and so on, and `questions.json`; all the paths."""
    sample = draw_sample(random.Random(seed), layout)
    paths = [directory / f"picture-{number}.png" for number in range(1, len(sample.pictures) + 1)]
    questions = directory / "questions.json"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, picture in zip(paths, sample.pictures, strict=True):
            path.write_bytes(encode_png(picture))
        write_json(questions, {turn.question: turn.answer for turn in sample.turns})
    except OSError as error:
        raise StartupError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return [*paths, questions]
