"""The overlapped loop at its seam with the device: what is launched before what is read, how a device's end shows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from engine_support import running_engine

from prism_server.engine.device_timer import StepTimer
from prism_server.engine.executor import StepHandle
from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.runner import RunningStep
from prism_server.errors import EngineFault


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


def test_what_fails_on_the_device_while_a_step_runs_is_an_engine_fault_of_its_wait() -> None:
    class Lost(StepTimer):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    step = RunningStep(StepPlan(1), False, {}, None, Lost(torch.device("cpu")), None, None)
    with pytest.raises(EngineFault, match="the device failed: CUDA error: an illegal memory access"):
        step.wait()
