"""Steps that the executor has been given and has not given back yet."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from prism_server.engine.cost_model import CostModel, Observation
from prism_server.engine.plan import StepResult
from prism_server.engine.plan_builder import LaunchedRows, PlanBuilder
from prism_server.engine.sequence import Sequence
from prism_server.errors import EngineFault


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What the completion of a launched plan needs to know."""

    step: int
    rows: tuple[LaunchedRows, ...]
    num_decodes: int
    patch_blocks: int
    encodes_for: frozenset[Sequence]
    swaps_in: bool
    """Its rows wait for pages from the host, for a time that is no work's."""


class LaunchedSteps:
    """They complete in order. What each took is counted, and the cost model learns from those without swap-ins."""

    def __init__(self, cost: CostModel, counters: Counter[str]) -> None:
        self._cost, self._counters = cost, counters
        self._steps: deque[LaunchedStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[LaunchedStep]:
        return iter(self._steps)

    def add(self, builder: PlanBuilder, patch_blocks: int) -> None:
        """The builder's plan is launched; `patch_blocks`: its encoder work."""
        rows, encodes_for = tuple(builder.launched), frozenset(builder.encodes_for)
        num_decodes, swaps_in = builder.num_decodes, bool(builder.swap_in)
        self._steps.append(LaunchedStep(builder.step, rows, num_decodes, patch_blocks, encodes_for, swaps_in))
        self._counters["steps"] += 1

    def complete(self, result: StepResult) -> LaunchedStep:
        """Take the oldest one; EngineFault if `result` is another's."""
        launched = self._steps.popleft()
        if launched.step != result.step:
            raise EngineFault(f"step {result.step} completed, but step {launched.step} was launched before it")
        self._observe(launched, result)
        return launched

    def _observe(self, launched: LaunchedStep, result: StepResult) -> None:
        num_tokens = sum(rows.end - rows.start for rows in launched.rows)
        self._counters["step_tokens"] += num_tokens
        self._counters["step_sequences"] += len(launched.rows)
        self._counters["step_microseconds"] += round(result.duration_ms * 1e3)
        self._counters["encode_microseconds"] += round(result.encode_ms * 1e3)
        self._counters["eager_steps"] += result.eager
        if launched.swaps_in:
            return
        seen = Observation(
            num_decodes=launched.num_decodes,
            num_prefill_tokens=num_tokens - launched.num_decodes,
            patch_blocks=launched.patch_blocks,
            language_ms=max(0.0, result.duration_ms - result.encode_ms),
            encode_ms=result.encode_ms,
            eager=result.eager,
        )
        self._cost.observe(seen)
