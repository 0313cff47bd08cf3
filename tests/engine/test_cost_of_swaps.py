"""A step that fetches pages from the host waits for them: what that says of the encoder and of later steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_support import pool_bytes, running_engine

from prism_server.engine import device_timer
from prism_server.engine.cost_model import CostModel
from prism_server.engine.encoding import Encoder
from prism_server.engine.launched import LaunchedSteps
from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.plan_builder import PlanBuilder
from prism_server.engine.rehearsal import Rehearsal
from prism_server.engine.runner import Runner, RunnerLimits
from prism_server.errors import PrismError
from prism_server.media.item import ItemKey
from prism_server.ops.host_pages import HostPages
from prism_server.ops.kv_storage import PagedKV

SWAP_S, ENCODE_S = 100.0, 7.0


class Clock:
    """Moves with what is done, and not by itself."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def test_a_swap_in_counts_to_its_step_and_not_to_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    swap_in, encode = HostPages.swap_in, Encoder.run

    def slow_swap_in(self: HostPages, kv: PagedKV, slots: tuple[int, ...], pages: tuple[int, ...]) -> None:
        clock.now_s += SWAP_S
        swap_in(self, kv, slots, pages)

    def slow_encode(self: Encoder, plan: StepPlan) -> dict[ItemKey, PrismError]:
        clock.now_s += ENCODE_S
        return encode(self, plan)

    with running_engine(num_pages=8, model__device="cpu", kv__host_bytes=pool_bytes(2)) as driver:
        runner = driver.engine._parts.executor
        assert isinstance(runner, Runner)
        launch = runner.launch
        monkeypatch.setattr(device_timer, "time", SimpleNamespace(perf_counter=clock.perf_counter))
        monkeypatch.setattr(HostPages, "swap_in", slow_swap_in)
        monkeypatch.setattr(Encoder, "run", slow_encode)
        rehearsal = Rehearsal(runner, RunnerLimits(1, 1, 16), 8, 16)
        assert rehearsal.encode(4).encode_ms == ENCODE_S * 1e3
        monkeypatch.setattr(runner, "launch", lambda plan: launch(replace(plan, swap_in=((0, 0),))))
        result = rehearsal.encode(4)
        assert result.encode_ms == ENCODE_S * 1e3
        assert result.duration_ms == (SWAP_S + ENCODE_S) * 1e3


@pytest.mark.parametrize("swaps", [False, True])
def test_the_cost_model_does_not_learn_from_steps_that_waited_for_pages_of_the_host(swaps: bool) -> None:
    cost, counters = CostModel(24.0, 512), Counter[str]()
    steps, builder = LaunchedSteps(cost, counters), PlanBuilder(1)
    if swaps:
        builder.swap_in.append((0, 0))
    steps.add(builder, patch_blocks=100)
    steps.complete(StepResult(1, (), (), duration_ms=90.0, encode_ms=50.0))
    assert cost.ms_per_patch_block == (0.0 if swaps else 0.5)
    assert counters["step_microseconds"] == 90_000, "it took that time all the same"
    assert counters["encode_microseconds"] == 50_000
