"""Which steps find their tokens by the head's FP8 copy, on a CPU, and that their answers are the head's."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from engine_support import Driver, Reply, agreement, running_engine, tokens_of
from reference_answers import draw_prompts
from torch import Tensor

from prism_server.engine.graphs import GraphFamily, family_sizes
from prism_server.engine.language import StepOutput
from prism_server.engine.messages import SamplingParams
from prism_server.engine.plan import StepPlan
from prism_server.engine.runner import Runner, RunningStep
from prism_server.engine.step_inputs import StepSize

MAX_SEQUENCES, MAX_ROWS = 6, 96
LEAST_AGREEMENT = 0.9
"""Of tokens where some are drawn at random: float32 sums in another order move the boundaries between two of them."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 6.0, "top_k": 50, "seed": 5},
    {"repetition_penalty": 1.4},
    {"logprobs": 3},
    {"min_tokens": 6},
    {},
]


@pytest.fixture
def driver() -> Iterator[Driver]:
    with running_engine(model__fp8_head="on", engine__max_running_sequences=MAX_SEQUENCES) as driver:
        yield driver


@pytest.fixture(scope="module")
def plain() -> Iterator[Driver]:
    with running_engine(engine__max_running_sequences=MAX_SEQUENCES) as driver:
        yield driver


def runner_of(driver: Driver) -> Runner:
    runner = driver.engine._parts.executor
    assert isinstance(runner, Runner)
    return runner


class Watch:
    """Notes for each step that draws: whether it only asks for likeliest tokens, and the ways it finds them."""

    def __init__(self, runner: Runner) -> None:
        self.steps: list[tuple[bool, list[str]]] = []
        self._ways: list[str] = []
        self._params: dict[int, SamplingParams] = {}
        self._start, text = runner.start, runner.model.text
        runner.start = self._watched  # type: ignore[method-assign]
        text.logits = self._named("head", text.logits)  # type: ignore[method-assign]
        text.best_tokens = self._named("copy", text.best_tokens)  # type: ignore[method-assign]

    def _named(self, way: str, find: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def named(hidden: Tensor) -> Tensor:
            self._ways.append(way)
            return find(hidden)

        return named

    def _watched(self, plan: StepPlan) -> RunningStep:
        self._params |= {start.slot: start.params for start in plan.slot_starts}
        self._ways = []
        step = self._start(plan)
        draws = [(self._params[rows.slot], rows.draw) for rows in plan.sequences if rows.draw is not None]
        if draws:
            self.steps.append((all(self._is_plain(params, draw) for params, draw in draws), self._ways))
        return step

    @staticmethod
    def _is_plain(params: SamplingParams, draw: int) -> bool:
        plain = SamplingParams(params.max_tokens, min_tokens=params.min_tokens)
        return params == plain and draw + 1 >= params.min_tokens


def ask_mixed(driver: Driver, seed: int) -> list[Reply]:
    """Greedy requests alone, then together with all others."""
    rng, prompts = random.Random(seed), draw_prompts(seed=seed, count=12, most_vision_tokens=60)
    alone = [driver.ask(parts, 8) for parts in prompts[:3]]
    sent = [driver.submit(p, rng.randint(6, 14), **OPTIONS[i % len(OPTIONS)]) for i, p in enumerate(prompts)]
    return alone + [reply.wait() for reply in sent]


def test_greedy_answers_are_those_of_the_head_itself(driver: Driver, plain: Driver) -> None:
    prompts = draw_prompts(seed=3, count=20, most_vision_tokens=100)
    watch = Watch(runner_of(driver))
    replies = driver.ask_all(prompts, 20)
    assert tokens_of(replies) == tokens_of(plain.ask_all(prompts, 20))  # the best two are never as close as rounding
    assert watch.steps
    assert all(step == (True, ["copy"]) for step in watch.steps)


def test_a_step_takes_the_copy_if_none_of_its_rows_asks_for_more(driver: Driver, plain: Driver) -> None:
    watch = Watch(runner_of(driver))
    replies = ask_mixed(driver, seed=1)
    assert agreement(replies, tokens_of(ask_mixed(plain, seed=1))) >= LEAST_AGREEMENT
    assert {is_plain for is_plain, _ in watch.steps} == {False, True}
    for is_plain, ways in watch.steps:
        assert ways == (["copy"] if is_plain else ["head"])


def test_a_cpu_has_no_copy_unless_it_is_asked_for(plain: Driver) -> None:
    assert not runner_of(plain).model.text.has_fp8_head
    watch = Watch(runner_of(plain))
    plain.ask(["Hello!"], 6)
    assert watch.steps
    assert all(ways == ["head"] for _, ways in watch.steps)


def test_padded_steps_take_the_copy_in_graphs_for_decodes_and_the_head_in_all_others(
    driver: Driver, plain: Driver
) -> None:
    runner, replayed = runner_of(driver), set[StepSize]()

    def replay(size: StepSize) -> StepOutput:
        replayed.add(size)
        return runner.run_padded(size)

    sizes = family_sizes(MAX_ROWS, MAX_SEQUENCES, fp8_head=True)
    media = StepSize(MAX_ROWS, MAX_SEQUENCES, MAX_SEQUENCES, media=True)
    runner.use_graphs(GraphFamily({size: partial(replay, size) for size in (*sizes, media)}))
    watch = Watch(runner)
    replies = ask_mixed(driver, seed=2)
    assert agreement(replies, tokens_of(ask_mixed(plain, seed=2))) >= LEAST_AGREEMENT
    assert {(size.each_row_draws, size.greedy) for size in replayed} == {(True, True), (True, False), (False, False)}
    for is_plain, ways in watch.steps:
        assert is_plain or ways == ["head"]
