"""The sum that sizes the page pool of a GPU from measured parts, and graphs that give way where memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from prism_server.capacity.units import MIB
from prism_server.engine.graphs import GraphFamily, capture_within, family_sizes
from prism_server.engine.memory import MemoryFigures
from prism_server.engine.step_inputs import StepSize

FIGURES = MemoryFigures(
    usable_bytes=80_000 * MIB,
    free_bytes=75_000 * MIB,
    weight_bytes=16_000 * MIB,
    step_bytes=2_000 * MIB,
    graph_bytes=500 * MIB,
    feature_bytes=1_000 * MIB,
    planned_bytes=0,
    reserve_bytes=250 * MIB,
)


def test_pages_get_what_the_fraction_leaves_beside_everything_measured() -> None:
    assert FIGURES.pool_bytes == (80_000 - 16_000 - 2_000 - 500 - 1_000 - 250) * MIB


def test_pages_never_get_more_than_what_is_free_on_a_card_that_others_use() -> None:
    assert replace(FIGURES, free_bytes=30_000 * MIB).pool_bytes == (30_000 - 2_000 - 500 - 1_000 - 250) * MIB
    assert replace(FIGURES, free_bytes=3_000 * MIB).pool_bytes < 0


@pytest.mark.parametrize("part", ["step_bytes", "graph_bytes", "feature_bytes", "reserve_bytes", "weight_bytes"])
def test_every_byte_of_a_part_is_a_byte_less_for_pages(part: str) -> None:
    more = replace(FIGURES, **{part: getattr(FIGURES, part) + 7})
    assert more.pool_bytes == FIGURES.pool_bytes - 7


def test_the_sum_is_told_in_one_line_with_every_part() -> None:
    line = FIGURES.explain()
    assert "\n" not in line
    for figure in ("80,000", "75,000", "16,000", "2,000", "500", "1,000", "250", "60,250"):
        assert f"{figure} MiB" in line


def family_of(sizes: Sequence[StepSize]) -> GraphFamily:
    return GraphFamily({size: partial(pytest.fail, "nothing is replayed here") for size in sizes})


@pytest.mark.parametrize(("needed_bytes", "most_rows"), [(0, 64), (500, 48), (800, 16), (1000, None)])
def test_the_largest_graphs_go_where_too_little_is_left_beside_them(needed_bytes: int, most_rows: int | None) -> None:
    """Here a family takes ten bytes for each row of its largest size, of a thousand."""
    tried: list[GraphFamily] = []

    def capture(sizes: Sequence[StepSize]) -> GraphFamily:
        tried.append(family_of(sizes))
        return tried[-1]

    def free_bytes() -> int:
        return 1000 - 10 * max(size.rows for size in tried[-1].sizes)

    sizes = family_sizes(64, 8)
    family = capture_within(sizes, capture, free_bytes, needed_bytes)
    left = [size for size in sizes if most_rows is not None and size.rows <= most_rows]
    assert sorted(family.sizes) == sorted(left)
