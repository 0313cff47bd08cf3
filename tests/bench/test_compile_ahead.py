"""What of a search's candidates is left once all have been compiled."""

from __future__ import annotations

import pytest

from prism_server.bench.compile_ahead import compile_all


def compile_one(candidate: str) -> str | None:
    if candidate == "raises":
        raise ValueError("too large")
    return "spills" if candidate == "wrong" else None


def test_candidates_that_run_stay_in_their_order_and_the_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    assert compile_all(compile_one, ["first", "wrong", "second", "raises", "third"], 200.0) == [
        "first",
        "second",
        "third",
    ]
    assert sorted(caplog.messages) == ["left out raises: too large", "left out wrong: spills"]
