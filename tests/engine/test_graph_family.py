"""Which sizes of steps are captured, and which graph a step takes."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_server.engine.graphs import GraphFamily, family_sizes
from prism_server.engine.step_inputs import StepSize


def family_of(sizes: list[StepSize]) -> GraphFamily:
    return GraphFamily({size: partial(pytest.fail, "nothing is replayed here") for size in sizes})


@st.composite
def steps(draw: st.DrawFn, max_rows: int, max_sequences: int) -> StepSize:
    sequences = draw(st.integers(1, min(max_rows, max_sequences)))
    if draw(st.booleans()):
        return StepSize(sequences, sequences, sequences, each_row_draws=True)
    return StepSize(draw(st.integers(sequences, max_rows)), sequences, draw(st.integers(0, sequences)))


@given(st.data())
def test_every_step_of_at_most_the_largest_rows_takes_the_smallest_graph_that_holds_it(data: st.DataObject) -> None:
    max_rows, max_sequences = data.draw(st.integers(1, 600)), data.draw(st.integers(1, 300))
    sizes = family_sizes(max_rows, max_sequences)
    family, step = family_of(sizes), data.draw(steps(max_rows, max_sequences))
    chosen = family.size_or_none(step)
    assert chosen is not None
    for size in sizes:
        holds = size.rows >= step.rows and size.sequences >= step.sequences and size.draws >= step.draws
        holds = holds and (step.each_row_draws or not size.each_row_draws)
        if size == chosen:
            assert holds
        elif holds:
            assert (size.rows, size.sequences) >= (chosen.rows, chosen.sequences)


def test_larger_steps_take_no_graph_and_neither_do_those_whose_graph_was_left_out() -> None:
    sizes = family_sizes(512, 64)
    assert family_of(sizes).size_or_none(StepSize(513, 3, 3)) is None
    small = [size for size in sizes if size.rows < 512]
    assert family_of(small).size_or_none(StepSize(512, 3, 3)) is None
    assert family_of([]).size_or_none(StepSize(1, 1, 1, each_row_draws=True)) is None
    mixed_only = [size for size in sizes if not size.each_row_draws]
    assert family_of(mixed_only).size_or_none(StepSize(5, 5, 5, each_row_draws=True)) == StepSize(16, 16, 16)


def test_the_default_family_is_modest_and_starts_with_the_largest() -> None:
    sizes = family_sizes(512, 64)
    assert len(sizes) == len(set(sizes)) <= 50
    assert sizes == sorted(sizes, reverse=True)
    assert max(size.rows for size in sizes) == 512
    assert [size.rows for size in sizes if size.each_row_draws] == [64, 48, 32, 24, 16, 12, 8, 4, 2, 1]


def test_a_step_that_shows_media_takes_a_graph_that_can_and_no_other_step_does() -> None:
    family = family_of(family_sizes(1024, 64))
    shown = family.size_or_none(StepSize(700, 9, 8, media=True))
    assert shown == StepSize(768, 64, 64, media=True)
    plain = family.size_or_none(StepSize(700, 9, 8))
    assert plain is not None
    assert not plain.media
    assert family.size_or_none(StepSize(1025, 1, 1, media=True)) is None


def test_with_an_fp8_head_decodes_have_a_graph_for_either_way_and_other_steps_take_the_head() -> None:
    sizes = family_sizes(512, 64, fp8_head=True)
    family = family_of(sizes)
    decodes = [size for size in family_sizes(512, 64) if size.each_row_draws]
    assert len(sizes) == len(family_sizes(512, 64)) + len(decodes)
    for sequences in (1, 5, 64):
        greedy, other = (
            family.size_or_none(StepSize(sequences, sequences, sequences, each_row_draws=True, greedy=greedy))
            for greedy in (True, False)
        )
        assert greedy is not None
        assert greedy.greedy
        assert other == dataclasses.replace(greedy, greedy=False)
    mixed = family.size_or_none(StepSize(30, 5, 5, greedy=True))
    assert mixed == family.size_or_none(StepSize(30, 5, 5))
    left = family_of([size for size in sizes if not size.greedy])
    assert left.size_or_none(StepSize(5, 5, 5, each_row_draws=True, greedy=True)) == decodes[-4]
