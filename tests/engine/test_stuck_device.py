"""What the engine shows of a device that stands still, and how it is stopped then."""

from __future__ import annotations

import threading
import time

import pytest
from engine_support import Driver, running_engine, settings_with, wait_until

from prism_server.engine import engine as engine_module
from prism_server.engine.engine import Engine
from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.runner import Runner

WAIT_S = 60.0


def test_an_engine_that_has_nothing_to_do_is_in_no_turn() -> None:
    with running_engine() as driver:
        driver.ask(["Hello"], max_tokens=3)
        wait_until(lambda: driver.engine.turn_began_s is None)


def test_a_step_that_does_not_end_is_a_turn_that_goes_on_and_stopping_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, entered = threading.Event(), threading.Event()
    execute = Runner.execute

    def stuck(self: Runner, plan: StepPlan) -> StepResult:
        entered.set()
        release.wait(WAIT_S)
        return execute(self, plan)

    monkeypatch.setattr(Runner, "execute", stuck)
    monkeypatch.setattr(engine_module, "STOP_TIMEOUT_S", 0.2)
    engine = Engine.build(settings_with())
    driver = Driver(engine)
    try:
        asked_s = time.monotonic()
        reply = driver.submit(["Hello"], max_tokens=3)
        assert entered.wait(WAIT_S)
        wait_until(lambda: (engine.turn_began_s or time.monotonic()) < time.monotonic() - 0.1)
        began_s = engine.turn_began_s
        assert began_s is not None
        assert asked_s <= began_s
        assert not engine.stop()
        assert not reply.ends
    finally:
        release.set()
    reply.wait()
    assert reply.error is not None, "it was stopped"
    monkeypatch.setattr(engine_module, "STOP_TIMEOUT_S", WAIT_S)
    assert engine.stop()
