"""Batches: the same for the same number, true to what they show, and weighted as the recipe says."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch

from prism_server.demo_model import LAYOUT_BY_NAME, LAYOUTS, checkpoint_dir, draw_sample
from prism_server.demo_model.training.batches import draw_batch, draw_turns, num_rows
from prism_server.demo_model.training.prompts import PromptWriter, row_length
from prism_server.demo_model.training.recipe import TASKS, Recipe
from prism_server.demo_model.training.stream import BatchStream, stream_batches
from prism_server.errors import StartupError

TOKENS = 1500


@pytest.fixture(scope="module")
def writer() -> PromptWriter:
    return PromptWriter(checkpoint_dir())


def test_batch_n_is_the_same_wherever_it_is_drawn_and_wherever_one_begins() -> None:
    stream = BatchStream(Recipe(total_steps=10, batch_tokens=TOKENS), checkpoint_dir())
    here = stream_batches(stream, 0, 0, pin_memory=False)
    first = [next(here) for _ in range(6)]
    workers = stream_batches(stream, 2, 2, pin_memory=False)
    for expected in first[2:]:
        actual = next(workers)
        assert actual.layout == expected.layout
        assert all(map(torch.equal, actual.tensors(), expected.tensors()))
    assert len({tuple(batch.ids.flatten().tolist()) for batch in first}) == 6


def test_a_picture_stands_in_several_rows_and_its_cells_go_with_it(writer: PromptWriter) -> None:
    layout = LAYOUT_BY_NAME["scenes-3"]
    batch, asked = draw_batch(random.Random(0), writer, layout, 40, {})
    assert [picture.shape for picture in batch.pictures] == [(20, 1, 96, 96, 3), (10, 1, 128, 128, 3)]
    assert [cell.shape for cell in batch.cells] == [(20, 9, 2), (10, 16, 2)]
    assert batch.ids.shape == (40, row_length(layout))
    assert (batch.shown[:, 0] != batch.shown[:, 2]).all()
    for pictures, cells in zip(batch.pictures, batch.cells, strict=True):
        for picture, cell in zip(pictures, cells, strict=True):
            values = picture[0].numpy().astype(np.int16)
            contrast = np.abs(values - values[0, 0]).max()
            assert (contrast > 60) == bool(cell.any())
    shape_questions = [task for row in asked.tasks for task in row]
    assert {"which", "where", "count"} <= set(shape_questions)


def test_the_slots_of_a_clip_show_one_clip_in_order(writer: PromptWriter) -> None:
    batch, _ = draw_batch(random.Random(0), writer, LAYOUT_BY_NAME["clip-8"], 10, {})
    assert batch.pictures[0].shape == (5 * 4, 2, 96, 96, 3)
    assert (batch.shown == batch.shown[:, :1] + torch.arange(4)).all()
    assert (batch.shown[:, 0] % 4 == 0).all()


def test_media_rows_hold_the_placeholders_of_their_row(writer: PromptWriter) -> None:
    for name in ("pages-2-mixed", "clip-4"):
        layout = LAYOUT_BY_NAME[name]
        batch, _ = draw_batch(random.Random(1), writer, layout, 6, {})
        ids = batch.ids.flatten()
        (token,) = set(ids[batch.media_rows.flatten()].tolist())
        assert writer.opening(layout, False).ids.tolist().count(token) == layout.vision_tokens
        assert int((ids == token).sum()) == batch.media_rows.numel()
        assert (batch.media_rows // row_length(layout) == torch.arange(6)[:, None]).all()


def test_a_heavier_task_is_asked_more_often() -> None:
    def share_of_find(weights: dict[str, float]) -> float:
        rng, seen = random.Random(5), Counter[str]()
        media = draw_sample(rng, LAYOUT_BY_NAME["pages-4"]).media
        for _ in range(300):
            seen.update(turn.task for turn in draw_turns(rng, media, 1, weights))
        return seen["find"] / seen.total()

    assert share_of_find({"find": 4.0}) > 2 * share_of_find({})
    assert share_of_find({"find": 0.1}) < 0.5 * share_of_find({})


def test_every_task_of_the_generator_is_known() -> None:
    rng = random.Random(0)
    layouts = [LAYOUT_BY_NAME[name] for name in ("scene-96", "scenes-3", "pages-2", "clip-4", "text")]
    asked = {turn.task for layout in layouts for _ in range(40) for turn in draw_sample(rng, layout).turns}
    assert asked == set(TASKS)


def test_rows_fill_the_tokens_of_a_batch() -> None:
    for layout in LAYOUTS:
        assert 0.9 * 49152 < num_rows(layout, 49152) * row_length(layout) <= 49152
        assert num_rows(layout, 1) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"total_steps": 3, "total_minutes": 1.0}, "not both"),
        ({"total_steps": 0}, "positive"),
        ({"peak_lr": 0.0}, "positive"),
        ({"task_weights": {"fnid": 2.0}}, "unknown task 'fnid'"),
        ({"task_weights": {"find": 0.0}}, "above 0"),
        ({"layout_weights": {"pages-8": -1.0}}, "at least 0"),
        ({"layout_weights": {layout.name: 0.0 for layout in LAYOUTS}}, "every layout has weight 0"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(options: dict[str, object], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        Recipe(**options)  # type: ignore[arg-type]


def test_rates_rise_and_fall_and_the_auxiliary_losses_fade() -> None:
    recipe = Recipe(peak_lr=1.0, warmup_steps=10, total_steps=100, aux_weight=2.0)
    rates = [recipe.learning_rate(step, recipe.progress(step, 0.0)) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates.index(max(rates)) == 9
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.02)
    assert [recipe.auxiliary_weight(progress) for progress in (0.0, 0.25, 0.5, 1.0)] == [2.0, 1.0, 0.1, 0.1]
    timed = recipe.from_json(Recipe(peak_lr=1.0).lasting(2.0).as_json())
    assert timed.progress(7, 60.0) == 0.5
    assert timed.lasting(9.0) == timed
