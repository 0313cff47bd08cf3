"""What the generator draws and asks: repeatable, of the promised sizes, within the text budget, and true."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from prism_server.demo_model import LAYOUT_BY_NAME, LAYOUTS, Layout, Sample, checkpoint_dir, draw_sample, encode_png
from prism_server.demo_model.clips import Clip, draw_clip
from prism_server.demo_model.drawing import COLOR_NAMES, COLORS, SHAPES, draw_shape, encode_jpeg
from prism_server.demo_model.layouts import Slot
from prism_server.demo_model.pages import GLYPHS, Page, draw_page
from prism_server.demo_model.samples import TEXT_TURNS
from prism_server.demo_model.scenes import PLURALS, Scene, draw_scene

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
SEEDS = range(40)


def samples(kind: str, seeds: range = SEEDS) -> Iterator[Sample]:
    for layout in LAYOUTS:
        if layout.kind == kind:
            yield from (draw_sample(random.Random(seed), layout) for seed in seeds)


def pixels(image: Image.Image) -> bytes:
    return image.tobytes()


@every_layout
def test_equal_seeds_give_equal_samples_and_other_seeds_others(layout: Layout) -> None:
    first, again, other = (draw_sample(random.Random(seed), layout) for seed in (1, 1, 2))
    assert first.turns == again.turns
    assert list(map(pixels, first.pictures)) == list(map(pixels, again.pictures))
    assert first.turns != other.turns


@every_layout
def test_every_picture_fills_its_slot(layout: Layout) -> None:
    sample = draw_sample(random.Random(3), layout)
    sizes = [(slot.width, slot.height) for slot in layout.slots for _ in range(2 if layout.kind == "clip" else 1)]
    assert [picture.size for picture in sample.pictures] == sizes
    assert {picture.mode for picture in sample.pictures} <= {"RGB"}


@every_layout
def test_questions_of_a_sample_differ_and_none_is_empty(layout: Layout) -> None:
    for seed in SEEDS:
        turns = draw_sample(random.Random(seed), layout).turns
        assert turns
        assert len({turn.question for turn in turns}) == len(turns)
        assert all(turn.task and turn.question and turn.answer for turn in turns)


@every_layout
def test_any_question_with_its_answer_fits_the_text_budget(layout: Layout) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint_dir() / "tokenizer.json"))
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    shown = "".join("<5.2 seconds>" * (layout.kind == "clip") + "<|vision_start|><|vision_end|>" for _ in layout.slots)
    for seed in SEEDS:
        for turn in draw_sample(random.Random(seed), layout).turns:
            chat = f"<|im_start|>user\n{shown}{turn.question}<|im_end|>\n<|im_start|>assistant\n{turn.answer}<|im_end|>"
            assert len(tokenizer.encode(system + chat, add_special_tokens=False).ids) <= layout.text_tokens


def test_a_picture_survives_png_unchanged_and_jpeg_nearly() -> None:
    image = draw_page(random.Random(0), Slot(224, 288)).image
    assert pixels(Image.open(io.BytesIO(encode_png(image)))) == pixels(image)
    jpeg = Image.open(io.BytesIO(encode_jpeg(image)))
    assert jpeg.format == "JPEG"
    difference = np.abs(np.asarray(jpeg, np.int16) - np.asarray(image, np.int16))
    assert 0 < difference.mean() < 4


def test_layout_names_are_unique_and_count_their_vision_tokens() -> None:
    assert len(LAYOUT_BY_NAME) == len(LAYOUTS)
    assert LAYOUT_BY_NAME["pages-8"].vision_tokens == 640
    assert LAYOUT_BY_NAME["text"].vision_tokens == 0


@pytest.mark.parametrize("size", [(0, 96), (96, 100), (33, 32)])
def test_a_slot_that_is_no_multiple_of_a_token_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        Slot(*size)


# ---- scenes


def test_each_shape_is_drawn_in_its_colour_in_its_cell_of_the_grid() -> None:
    for seed in SEEDS:
        scene = draw_scene(random.Random(seed), Slot(192, 160))
        for shape, mark in zip(scene.shapes, scene.marks, strict=True):
            assert (int(mark.y // (160 / 3)), int(mark.x // (192 / 3))) == divmod(shape.cell, 3)
            drawn = np.asarray(scene.image)[round(mark.y), round(mark.x)]
            assert np.abs(np.subtract(drawn, COLORS[shape.color])).max() <= 14
            assert (COLOR_NAMES[mark.color - 1], SHAPES[mark.shape - 1]) == (shape.color, shape.shape)
        assert len({shape.cell for shape in scene.shapes}) == len(scene.shapes)


def test_mark_cells_say_what_lies_in_each_vision_token() -> None:
    scene = draw_scene(random.Random(4), Slot(192, 192))
    cells = scene.mark_cells()
    assert cells.shape == (6, 6, 2)
    for mark in scene.marks:
        assert tuple(cells[int(mark.y) // 32, int(mark.x) // 32]) == (mark.color, mark.shape)
    assert (cells == 0).any()


def scene_answer(scene: Scene, question: str) -> str:
    """The answer that the shapes alone give, found by the words of the question."""
    shapes = scene.shapes
    if match := re.fullmatch(r"Wh(?:at|ich) color (?:is|does) the (\w+)(?: have)?\?", question):
        return next(shape.color for shape in shapes if shape.shape == match[1])
    if match := re.fullmatch(r"Which shape is (\w+)\?", question):
        return next(shape.shape for shape in shapes if shape.color == match[1])
    if match := re.fullmatch(r"Is there a (\w+) (\w+)\?", question):
        return "yes" if any(shape[:2] == match.groups() for shape in shapes) else "no"
    if match := re.fullmatch(r"Where is the (\w+) (\w+)\?", question):
        (cell,) = [shape.cell for shape in shapes if shape[:2] == match.groups()]
        vertical, horizontal = ("top", "middle", "bottom")[cell // 3], ("left", "center", "right")[cell % 3]
        return "center" if cell == 4 else f"{vertical} {horizontal}"
    if question == "How many objects are there?":
        return str(len(shapes))
    if match := re.fullmatch(r"How many (\w+) are there\?", question):
        return str(Counter(PLURALS[shape.shape] for shape in shapes)[match[1]])
    assert question in ("Describe the picture.", "Describe what you see.")
    named = [f"a {shape.name} at the {shape.place}" for shape in shapes]
    return ", ".join([*named[:-2], " and ".join(named[-2:])]) + "."


def test_answers_about_one_picture_agree_with_what_is_drawn() -> None:
    tasks = Counter[str]()
    for sample in samples("scene"):
        if len(sample.media) == 1:
            (scene,) = sample.media
            assert isinstance(scene, Scene)
            for turn in sample.turns:
                assert turn.answer == scene_answer(scene, turn.question)
                tasks[turn.task] += 1
    assert set(tasks) == {"color", "shape", "count", "where", "yesno", "describe", "total"}


def test_answers_about_several_pictures_agree_with_the_picture_they_name() -> None:
    tasks = Counter[str]()
    for sample in samples("scene"):
        scenes = [scene for scene in sample.media if isinstance(scene, Scene)]
        for turn in sample.turns if len(scenes) > 1 else ():
            tasks[turn.task] += 1
            if turn.task == "which":
                name = turn.question.removeprefix("In which picture is the ").removesuffix("?")
                holders = [number for number, scene in enumerate(scenes, 1) if name in {s.name for s in scene.shapes}]
                assert turn.answer == f"picture {holders[0]}"
                assert len(holders) == 1
            elif turn.task == "media":
                assert turn.answer == str(len(scenes))
            else:
                place = re.search(r" in picture (\d)", turn.question)
                assert place is not None
                assert turn.answer == scene_answer(scenes[int(place[1]) - 1], turn.question.replace(place[0], ""))
    assert {"which", "media", "where", "describe"} <= set(tasks)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_looks_like_no_other(shape: str) -> None:
    def drawn(name: str) -> bytes:
        image = Image.new("RGB", (32, 32))
        draw_shape(ImageDraw.Draw(image), name, 16, 16, 12, (255, 0, 0))
        return pixels(image)

    assert drawn(shape) not in {drawn(other) for other in SHAPES if other != shape}


# ---- pages


def test_the_total_is_the_sum_of_the_prices() -> None:
    for sample in samples("pages"):
        for page in sample.media:
            assert isinstance(page, Page)
            prices = [float(item.price) for item in page.invoice.items]
            assert float(page.invoice.total) == pytest.approx(sum(prices))
            assert re.fullmatch(r"\d+\.\d\d", page.invoice.total)


def test_every_line_stands_inside_the_page() -> None:
    for sample in samples("pages"):
        for picture in sample.pictures:
            page = np.asarray(picture, np.int16)
            edges = np.concatenate([page[:, [0, -1]].reshape(-1, 3), page[[0, -1]].reshape(-1, 3)])
            assert np.abs(edges - page[0, 0]).max() < 60


def test_glyph_cells_hold_the_characters_of_the_lines() -> None:
    for seed in SEEDS:
        page = draw_page(random.Random(seed), Slot(256, 320))
        written = [character for line in page.invoice.lines for character in line if character != " "]
        assert [GLYPHS[glyph.glyph_index] for glyph in page.glyphs] == written
        cells = page.glyph_cells()
        assert cells.shape == (10, 8, len(GLYPHS))
        assert {GLYPHS[index] for index in np.nonzero(cells)[2]} == set(written)
        assert all(0 <= glyph.x < 256 and 0 <= glyph.y < 320 for glyph in page.glyphs)


def page_answer(page: Page, question: str) -> str:
    """The answer that the invoice alone gives, found by the words of the question."""
    invoice = page.invoice
    fixed = {
        "What is the invoice number?": invoice.number,
        "Which invoice is this?": invoice.number,
        "What is the date?": invoice.date,
        "When was the invoice written?": invoice.date,
        "Who is the customer?": invoice.customer,
        "Who is the invoice for?": invoice.customer,
        "Who sent the invoice?": invoice.seller,
        "Who is the seller?": invoice.seller,
        "What is the total?": invoice.total,
        "How much is to be paid?": invoice.total,
        "How many items are listed?": str(len(invoice.items)),
        "Read the page.": "\n".join(invoice.lines),
        "Write out the page.": "\n".join(invoice.lines),
    }
    if question in fixed:
        return fixed[question]
    if match := re.fullmatch(r"How many (\w+) were bought\?", question):
        return next(str(item.quantity) for item in invoice.items if item.goods == match[1])
    if match := re.fullmatch(r"(?:What is the price of|How much do) the (\w+)(?: cost)?\?", question):
        return next(item.price for item in invoice.items if item.goods == match[1])
    match = re.fullmatch(r"Are (\w+) on the invoice\?", question)
    assert match is not None
    return "yes" if match[1] in {item.goods for item in invoice.items} else "no"


def test_answers_about_pages_agree_with_the_page_they_name() -> None:
    tasks = Counter[str]()
    for sample in samples("pages"):
        pages = [page for page in sample.media if isinstance(page, Page)]
        by_number = {page.invoice.number: (index, page) for index, page in enumerate(pages, 1)}
        for turn in sample.turns:
            tasks[turn.task] += 1
            place = re.search(r" on page (\d)", turn.question)
            page = pages[int(place[1]) - 1] if place else pages[0]
            question = turn.question.replace(place[0], "") if place else turn.question
            if turn.task == "json":
                invoice = page.invoice
                assert json.loads(turn.answer) == {
                    "invoice": invoice.number,
                    "date": invoice.date,
                    "customer": invoice.customer,
                    "total": invoice.total,
                }
            elif turn.task == "of":
                wording, number = turn.question.removesuffix("?").split(" of invoice ")
                assert turn.answer == page_answer(by_number[number][1], f"{wording}?")
            elif turn.task == "find":
                name = turn.question.removesuffix("?").split()[-1]
                found = [i for i, p in enumerate(pages, 1) if name in (p.invoice.number, p.invoice.customer)]
                assert [turn.answer] == [f"page {index}" for index in found]
            elif turn.task == "media":
                assert turn.answer == str(len(pages))
            else:
                assert turn.answer == page_answer(page, question)
    assert {"of", "find", "media", "json", "read", "has", "quantity", "price", "lines"} <= set(tasks)


# ---- clips and text


def test_a_clip_moves_as_it_says_and_shows_the_late_shape_from_its_pair_on() -> None:
    ways, late = Counter[str](), 0
    for seed in range(60):
        clip = draw_clip(random.Random(seed), LAYOUT_BY_NAME["clip-8"].slots)
        ways[clip.way] += 1
        frames = [np.asarray(frame, np.int16) for frame in clip.frames]
        present = [bool((np.abs(frame - COLORS[clip.color]).max(-1) <= 14).any()) for frame in frames]
        assert all(present)
        centres = [np.argwhere(np.abs(frame - COLORS[clip.color]).max(-1) <= 14).mean(0) for frame in frames]
        down, right = centres[-1] - centres[0]
        moved = {"left": right < -30, "right": right > 30, "up": down < -30, "down": down > 30}
        assert [way for way, holds in moved.items() if holds] == ([] if clip.way == "nowhere" else [clip.way])
        if clip.late:
            late += 1
            shown = [bool((np.abs(frame - COLORS[clip.late.color]).max(-1) <= 14).any()) for frame in frames]
            assert shown == [number >= 2 * clip.late.pair for number in range(8)]
    assert set(ways) == {"left", "right", "up", "down", "nowhere"}
    assert 0 < late < 60


def test_answers_about_clips_agree_with_what_happens() -> None:
    tasks = Counter[str]()
    for sample in samples("clip"):
        (clip,) = sample.media
        assert isinstance(clip, Clip)
        for turn in sample.turns:
            tasks[turn.task] += 1
            match turn.task:
                case "way":
                    assert turn.answer == ("it does not move" if clip.way == "nowhere" else clip.way)
                case "what":
                    assert turn.answer == f"a {clip.color} {clip.shape}"
                case "second":
                    assert turn.answer == (f"yes, a {clip.late.name}" if clip.late else "no")
                case "when":
                    assert clip.late is not None
                    assert turn.answer == f"at {clip.late.pair + 0.2:.1f} seconds"
                case _:
                    assert turn.answer.startswith(f"a {clip.name} ")
                    assert (" appears." in turn.answer) == (clip.late is not None)
    assert set(tasks) == {"way", "what", "when", "second", "clip"}


def test_a_clip_of_one_slot_or_of_unequal_slots_is_refused() -> None:
    for slots in ((Slot(96, 96),), (Slot(96, 96), Slot(128, 96))):
        with pytest.raises(ValueError, match="two slots of one size"):
            draw_clip(random.Random(0), slots)


def test_sums_are_right_and_repeated_words_are_the_same() -> None:
    tasks = Counter[str]()
    for sample in samples("text", range(100)):
        assert len(sample.turns) <= TEXT_TURNS
        for turn in sample.turns:
            tasks[turn.task] += 1
            if turn.task == "sum":
                first, second = map(int, re.findall(r"\d+", turn.question))
                assert turn.answer == str(first + second)
            elif turn.task == "repeat":
                assert turn.question == f"Repeat: {turn.answer}"
    assert set(tasks) == {"hello", "who", "sum", "repeat", "help"}
