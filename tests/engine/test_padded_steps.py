"""Steps padded to the sizes of graphs, on a CPU: what a graph would record is run eagerly on the same buffers."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
from engine_support import Driver, Reply, agreement, pool_bytes, running_engine, tokens_of
from reference_answers import draw_prompts, small_pictures

from prism_server.engine.graphs import GraphFamily, family_sizes
from prism_server.engine.rehearsal import Rehearsal
from prism_server.engine.runner import Runner, RunnerLimits
from prism_server.engine.step_inputs import StepSize

MAX_ROWS, MAX_SEQUENCES = 96, 6
WILD: dict[str, Any] = {"temperature": 6.0, "ignore_eos": True}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"seed": 5, **WILD},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "ignore_eos": True},
    {"logprobs": 4},
    {"min_tokens": 6},
    {"seed": 9, "presence_penalty": 1.0, "logprobs": 2, **WILD},
]


def runner_of(driver: Driver) -> Runner:
    runner = driver.engine._parts.executor
    assert isinstance(runner, Runner)
    return runner


def use_padded_steps(driver: Driver) -> None:
    runner = runner_of(driver)
    sizes = {*family_sizes(MAX_ROWS, MAX_SEQUENCES), StepSize(MAX_ROWS, MAX_SEQUENCES, MAX_SEQUENCES, media=True)}
    runner.use_graphs(GraphFamily({size: partial(runner.run_padded, size) for size in sizes}))


def ask_mixed(driver: Driver, seed: int) -> list[Reply]:
    """Cold and hot pictures, texts, all kinds of sampling, at once and one after the other."""
    rng = random.Random(seed)
    prompts = draw_prompts(seed=seed, count=12, most_vision_tokens=60)
    wanted = [(parts, OPTIONS[i % len(OPTIONS)]) for i, parts in enumerate(prompts)]
    replies = []
    for _ in range(2):
        sent = [driver.submit(parts, rng.randint(6, 14), **options) for parts, options in wanted]
        replies += [reply.wait() for reply in sent]
    return replies


@pytest.mark.parametrize("plain", [{}, {"engine__chunk_tokens": 16}])
def test_padded_steps_give_the_tokens_of_exact_ones(plain: dict[str, Any]) -> None:
    dotted = {"engine__max_running_sequences": MAX_SEQUENCES, **plain}
    with running_engine(**dotted) as driver:
        expected = ask_mixed(driver, seed=1)
        assert driver.counters()["eager_steps"] > 0
    with running_engine(**dotted) as driver:
        use_padded_steps(driver)
        padded = ask_mixed(driver, seed=1)
    assert agreement(padded, tokens_of(expected)) >= 0.97
    for one, other in zip(padded, expected, strict=True):
        if one.tokens != other.tokens:
            continue
        assert [found.logprob for found in one.logprobs] == pytest.approx(
            [found.logprob for found in other.logprobs], abs=1e-4
        )


def test_padded_steps_survive_preemption_and_swaps() -> None:
    tight: dict[str, Any] = {
        "num_pages": 9,
        "engine__max_running_sequences": MAX_SEQUENCES,
        "engine__max_context_tokens": 140,
        "kv__host_bytes": pool_bytes(12),
    }
    prompts = [[f"{'Hello! ' * 4}{i}"] for i in range(8)]
    with running_engine(engine__max_running_sequences=MAX_SEQUENCES) as driver:
        expected = driver.ask_all(prompts, 60, ignore_eos=True)
    with running_engine(**tight) as driver:
        use_padded_steps(driver)
        replies = driver.ask_all(prompts, 60, ignore_eos=True)
        counters = driver.counters()
        assert counters["preemptions"] > 0
        assert counters["swapped_in_pages"] > 0
    assert tokens_of(replies) == tokens_of(expected)


def test_steps_beyond_the_largest_graph_are_eager_and_counted() -> None:
    with running_engine(engine__max_running_sequences=MAX_SEQUENCES, kv__prefix_cache=True) as driver:
        use_padded_steps(driver)
        parts = [*small_pictures(3, 2), "What is shown?"]
        driver.ask(parts, 8)
        assert driver.counters()["encoded_items"] == 2
        driver.ask([*parts[:2], "Is it red?"], 8)
        driver.ask_all([["Hello!"], ["Hi"], parts], 8)
        assert driver.counters()["eager_steps"] == 0, "fresh pictures, repeats and texts are replayed"
        long_text = ["word " * 200]
        reply = driver.ask(long_text, 2, ignore_eos=True)
        assert reply.usage.prompt_tokens > MAX_ROWS
        assert driver.counters()["eager_steps"] == 1


def test_a_rehearsal_leaves_nothing_behind_that_a_request_could_see() -> None:
    prompts = draw_prompts(seed=4, count=4, most_vision_tokens=60)
    with running_engine(num_pages=40) as driver:
        expected = driver.ask_all(prompts, 8)
    with running_engine(num_pages=40, kv__host_bytes=pool_bytes(2)) as driver:
        info, engine = driver.engine.info, driver.engine._scheduler.limits
        limits = RunnerLimits(engine.max_running_sequences, info.total_pages, 256)
        rehearsal = Rehearsal(runner_of(driver), limits, info.total_pages, info.page_tokens)
        rehearsal.largest_steps(item_tokens=64)
        rehearsal.move(num_host_slots=2)
        decode, chunk, item = rehearsal.observations(item_tokens=64)
        assert (decode.num_decodes, chunk.num_prefill_tokens) == (1, 256)
        assert item.patch_blocks == 64 * 4 * runner_of(driver).model.config.vision.depth
        assert min(decode.language_ms, chunk.language_ms, item.encode_ms) > 0
        assert not runner_of(driver).encoder.features
        assert tokens_of(driver.ask_all(prompts, 8)) == tokens_of(expected)
