"""How late the next step is planned."""

from __future__ import annotations

import numpy as np
import pytest

from prism_server.engine.pacing import Pacing
from prism_server.engine.plan import RowCopy, SequenceRows, StepPlan, StepResult


def decode(step: int, num_sequences: int = 4) -> StepPlan:
    rows = (SequenceRows(slot, 100, 1, None, np.zeros((3, 1), np.int32), step) for slot in range(num_sequences))
    return StepPlan(step, sequences=tuple(rows))


def suffix(step: int, num_rows: int = 20) -> StepPlan:
    ids = np.zeros(num_rows, np.int32)
    return StepPlan(step, sequences=(SequenceRows(0, 100, num_rows, ids, np.zeros((3, num_rows), np.int32), 0),))


def took(step: int, ms: float = 5.0) -> StepResult:
    return StepResult(step, (), (), duration_ms=ms)


def test_the_owner_waits_until_shortly_before_the_step_in_flight_ends() -> None:
    pacing = Pacing()
    pacing.launched(0.001)
    pacing.step_over(9.0, 0.003, decode(0), took(0), decode(1))
    pacing.step_over(10.0, 0.003, decode(1), took(1), decode(2))
    assert 0.002 < pacing.lingers_for_s(10.0) < 0.005 - 0.001
    assert pacing.lingers_for_s(10.005) < 0


def test_a_slow_turn_is_allowed_for_and_forgotten() -> None:
    pacing = Pacing()
    pacing.launched(0.1)
    pacing.step_over(10.0, 0.003, decode(1), took(1), decode(2))
    assert pacing.lingers_for_s(10.0) <= 0
    for _ in range(400):
        pacing.launched(0.0005)
    pacing.step_over(9.0, 0.003, decode(1), took(1), decode(2))
    pacing.step_over(10.0, 0.003, decode(1), took(1), decode(2))
    assert pacing.lingers_for_s(10.0) > 0.003


@pytest.mark.parametrize(
    ("plan", "following"),
    [
        (decode(1), None),
        (decode(1), decode(2, 5)),
        (suffix(1), suffix(2)),
        (decode(1), suffix(2, 4)),
        (StepPlan(1, sequences=decode(1).sequences, row_copies=(RowCopy(1, 2, 3),)), decode(2)),
    ],
)
def test_it_plans_at_once_beside_a_step_whose_length_it_cannot_know(plan: StepPlan, following: StepPlan | None) -> None:
    pacing = Pacing()
    pacing.step_over(10.0, 0.003, plan, took(1), following)
    assert pacing.lingers_for_s(10.0) <= 0


def test_it_plans_at_once_when_the_step_had_ended_before_it_was_waited_for() -> None:
    pacing = Pacing()
    pacing.step_over(10.0, 0.00001, decode(1), took(1), decode(2))
    assert pacing.lingers_for_s(10.0) <= 0


def test_a_step_that_was_held_up_says_nothing_about_the_next() -> None:
    pacing = Pacing()
    pacing.step_over(9.0, 0.003, decode(1), took(1, 5.0), decode(2))
    pacing.step_over(10.0, 0.9, decode(2), took(2, 900.0), decode(3))
    assert pacing.lingers_for_s(10.0) < 0.005
