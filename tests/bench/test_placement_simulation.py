"""The simulation of placement, small: it repeats itself, and shows what the large one shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from prism_server.bench.placement_cli import run_placement
from prism_server.bench.placement_simulation import PRISM, Cell, Plan, simulate
from prism_server.bench.placement_world import POOL_TOKENS, LruCache
from prism_server.identity import framed_digest

SMALL = Plan(num_requests=6000, pods=(4,), exponents=(1.0,))


def outcome(cell: Cell) -> Cell:
    """Without the times of this run."""
    return replace(cell, wall_s={})


@pytest.fixture(scope="module")
def cell() -> Cell:
    return simulate(SMALL)[0]


def test_the_same_seed_gives_the_same_numbers(cell: Cell) -> None:
    assert outcome(simulate(SMALL)[0]) == outcome(cell)
    assert outcome(simulate(replace(SMALL, seed=1))[0]) != outcome(cell)


def test_placement_by_content_finds_what_others_compute_again(cell: Cell) -> None:
    prism = cell.outcomes[PRISM]
    for name in ("random", "round robin", "least loaded", "text prefix"):
        assert prism.hit_rate > cell.outcomes[name].hit_rate + 0.1
    assert prism.busiest_work < 1.25 < cell.outcomes["consistent hash"].busiest_requests
    assert cell.one_pod_hit_rate > prism.hit_rate > cell.one_pod_hit_rate - 0.04


def test_the_simulated_cache_lets_the_oldest_go() -> None:
    cache, keys = LruCache(10), [framed_digest("key", (i,)) for i in range(3)]
    assert [cache.use(key, 4) for key in (*keys[:2], keys[0], keys[2])] == [False, False, True, False]
    assert cache.shrink() == [keys[1]]
    assert keys[0] in cache
    assert POOL_TOKENS > 10


def test_the_command_writes_a_table_numbers_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, plot = tmp_path / "numbers.json", tmp_path / "plot.svg"
    code = run_placement(["--requests", "900", "--pods", "2", "--json", str(numbers), "--plot", str(plot)])
    assert code == 0
    assert capsys.readouterr().out.count("| 2 |") == 3
    assert len(json.loads(numbers.read_text())["cells"]) == 3
    assert plot.read_text().startswith("<svg")
    assert plot.read_text().endswith("</svg>\n")
