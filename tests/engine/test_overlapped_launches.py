"""The overlapped loop at its seam with the device: what is launched before what is read, how a device's end shows."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
import torch
from engine_support import running_engine, wait_until

from prism_server.engine.device_timer import StepTimer
from prism_server.engine.executor import StepHandle
from prism_server.engine.pacing import Pacing
from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.runner import RunningStep
from prism_server.errors import EngineFault

STEP_S = 0.03
"""Long beside a step of the demo model and what planning takes."""


@dataclass
class Watched(StepHandle):
    """Notes when a step's tokens are asked for."""

    step: int
    handle: StepHandle
    notes: list[tuple[str, int]]

    def wait(self) -> StepResult:
        self.notes.append(("read", self.step))
        return self.handle.wait()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_is_launched_before_the_tokens_of_the_step_before_are_read(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[tuple[str, int]] = []
    with running_engine(engine__overlap=overlap) as driver:
        runner = driver.engine._parts.executor
        launch = runner.launch

        def watched(plan: StepPlan) -> StepHandle:
            notes.append(("launch", plan.step))
            return Watched(plan.step, launch(plan), notes)

        monkeypatch.setattr(runner, "launch", watched)
        driver.ask(["Hello!"], 10, ignore_eos=True)
    for step in range(2, 10):
        launched, read = notes.index(("launch", step)), notes.index(("read", step - 1))
        assert (launched < read) is overlap
        assert notes.index(("read", step - 1)) < notes.index(("launch", step + 1)), "one step ahead, no more"


def test_an_owner_that_plans_just_in_time_serves_and_cancels_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose steps all take as long, and longer than planning: the owner lingers beside each of them."""

    @dataclass
    class Paced(StepHandle):
        handle: StepHandle
        end_s: float

        def wait(self) -> StepResult:
            result = self.handle.wait()
            time.sleep(max(0.0, self.end_s - time.monotonic()))
            return replace(result, duration_ms=STEP_S * 1e3)

    with running_engine() as driver:
        expected = driver.ask(["Hello!"], 10, ignore_eos=True).tokens
    with running_engine() as driver:
        runner, free_s = driver.engine._parts.executor, 0.0
        launch = runner.launch

        def paced(plan: StepPlan) -> StepHandle:
            nonlocal free_s
            free_s = max(free_s, time.monotonic()) + STEP_S
            return Paced(launch(plan), free_s)

        waits: list[float] = []
        lingers = Pacing.lingers_for_s

        def noted(pacing: Pacing, now_s: float) -> float:
            waits.append(lingers(pacing, now_s))
            return waits[-1]

        monkeypatch.setattr(Pacing, "lingers_for_s", noted)
        monkeypatch.setattr(runner, "launch", paced)
        monkeypatch.setattr(runner, "repeats_itself", True)
        endless = driver.submit(["Hello!"], 5_000, ignore_eos=True)
        wait_until(lambda: max(waits, default=0.0) > 0)  # after a slow turn it takes a while
        joined = driver.ask(["Hello!"], 10, ignore_eos=True)
        assert joined.tokens == expected
        driver.engine.cancel(endless.request_id)
        endless.wait()


def test_what_fails_on_the_device_while_a_step_runs_is_an_engine_fault_of_its_wait() -> None:
    class Lost(StepTimer):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    step = RunningStep(StepPlan(1), False, {}, None, Lost(torch.device("cpu")), None, None)
    with pytest.raises(EngineFault, match="the device failed: CUDA error: an illegal memory access"):
        step.wait()
