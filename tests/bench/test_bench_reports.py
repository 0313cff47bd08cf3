"""Questions, scores and tables: what a measurement asks, counts and prints."""

from __future__ import annotations

import io

import av
import pytest
from PIL import Image

from prism_server.bench.client import clip_message
from prism_server.bench.questions import CLIP_LAYOUTS, PICTURE_LAYOUTS, Question, draw_questions
from prism_server.bench.report import table
from prism_server.bench.scores import REFERENCE, Run, Scores
from prism_server.demo_model import LAYOUT_BY_NAME


def test_equal_seeds_ask_equal_questions_and_others_ask_others() -> None:
    layouts = [LAYOUT_BY_NAME["scene-96"], LAYOUT_BY_NAME["text"]]
    first, again, other = (draw_questions(9, seed, layouts) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_questions_are_spread_evenly_over_every_layout_but_the_clips() -> None:
    questions = draw_questions(2 * len(PICTURE_LAYOUTS) + 1, seed=0)
    asked = [sum(question.layout == layout.name for question in questions) for layout in PICTURE_LAYOUTS]
    assert asked == [3] + [2] * (len(PICTURE_LAYOUTS) - 1)
    assert {layout.kind for layout in PICTURE_LAYOUTS} == {"scene", "pages", "text"}


def test_clips_are_asked_about_as_lists_and_as_files_of_the_same_frames() -> None:
    questions = draw_questions(24, 0, CLIP_LAYOUTS)
    assert {layout.kind for layout in CLIP_LAYOUTS} == {"clip"}
    assert {question.fps for question in questions} == {2.0}
    assert {question.file is None for question in questions} == {False, True}
    question = next(question for question in questions if question.file is not None)
    (part, text) = clip_message(question.pictures, 2.0, question.file, question.text)["content"]
    assert part["video_url"]["url"].startswith("data:video/x-matroska;base64,")
    assert text == {"type": "text", "text": question.text}
    with av.open(io.BytesIO(question.file or b"")) as container:
        decoded = [frame.to_ndarray(format="rgb24").tobytes() for frame in container.decode(video=0)]
    drawn = [Image.open(io.BytesIO(picture)).convert("RGB").tobytes() for picture in question.pictures]
    assert decoded == drawn
    (listed, _) = clip_message(question.pictures, 2.0, None, question.text)["content"]
    assert (len(listed["video"]), listed["fps"]) == (len(question.pictures), 2.0)


def test_questions_of_one_sample_share_their_pictures() -> None:
    layout = LAYOUT_BY_NAME["scenes-2"]
    questions = draw_questions(5, 0, [layout])
    assert len({question.pictures for question in questions}) == 1
    sizes = [Image.open(io.BytesIO(picture)).size for picture in questions[0].pictures]
    assert sizes == [(slot.width, slot.height) for slot in layout.slots]


def scores(*right: int, asked: int = 200) -> Scores:
    """Runs of which each has the first `right` questions right; the last run is the reference."""
    questions = [Question("even" if i % 2 == 0 else "odd", "count", f"{i}?", str(i), ()) for i in range(asked)]
    names = [*(f"run{i}" for i in range(len(right) - 1)), REFERENCE]
    runs = [
        Run(name, tuple(str(i) if i < r else "no" for i in range(asked)), 1.0)
        for name, r in zip(names, right, strict=True)
    ]
    return Scores(questions, runs)


@pytest.mark.parametrize(
    ("right", "pairs"),
    [((180, 182, 180), 0), ((180, 183, 181), 1), ((183, 180, 180), 2), ((180, 183, 186), 3)],
)
def test_runs_more_than_a_point_apart_disagree(right: tuple[int, ...], pairs: int) -> None:
    assert len(scores(*right).disagreements()) == pairs


def test_right_answers_are_counted_by_layout_by_task_and_in_all() -> None:
    report = scores(7, 4, asked=10).as_json()
    first, reference = report["runs"]
    assert (first["right"], first["points"], reference["right"]) == (7, 70.0, 4)
    assert first["right_by_layout"] == {"even": 4, "odd": 3}
    assert first["right_by_task"] == {"count": 7}
    assert [wrong["expected"] for wrong in report["wrong_somewhere"]] == ["4", "5", "6", "7", "8", "9"]
    lines = [line.split() for line in scores(7, 4, asked=10).tables().splitlines()]
    assert ["even", "5", "4", "2"] in lines
    assert ["points", "from", "the", "reference", "+30.00", "+0.00"] in lines


def test_a_table_is_as_wide_as_its_cells_and_has_no_trailing_blanks() -> None:
    assert table(["name", "n", ""], [["a", 1, "x"], ["longer", 1000, ""]]) == (
        "name       n\na          1  x\nlonger  1000"
    )
