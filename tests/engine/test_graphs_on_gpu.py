"""Whole engines on a GPU: captured steps against eager ones and the plain loop, and what a server relies on."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import Driver, Reply, agreement, pool_bytes, running_engine, tokens_of
from reference_answers import draw_prompts, small_pictures

from prism_server.engine.graphs import GraphFamily
from prism_server.engine.language import StepOutput
from prism_server.engine.messages import SamplingParams
from prism_server.engine.plan import PageAssignment, SequenceRows, SlotStart, StepPlan
from prism_server.engine.runner import Runner, RunningStep
from prism_server.engine.step_inputs import StepSize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MAX_SEQUENCES, MAX_ROWS, NUM_PAGES = 8, 128, 400
ON_GPU: dict[str, Any] = {
    "model__device": "cuda",
    "kv__dtype": "fp8",
    "kv__page_tokens": 64,
    "engine__max_running_sequences": MAX_SEQUENCES,
    "engine__max_graph_tokens": MAX_ROWS,
    "engine__max_step_tokens": 2048,
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"logprobs": 4},
    {"min_tokens": 8},
]
WILD: dict[str, Any] = {"temperature": 6.0, "ignore_eos": True}
LEAST_AGREEMENT = 0.98
"""Of tokens: padding changes the shape of a product, and with it the order of sums in BF16."""


@contextlib.contextmanager
def engine_on_gpu(num_pages: int = NUM_PAGES, **dotted: Any) -> Iterator[Driver]:
    with running_engine(num_pages=num_pages, **ON_GPU | dotted) as driver:
        yield driver


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """With graphs."""
    with engine_on_gpu() as driver:
        if not driver.engine.info.graphs:
            pytest.skip(f"the backend {driver.engine.info.backend} has no graphs")
        yield driver


def runner_of(driver: Driver) -> Runner:
    runner = driver.engine._parts.executor
    assert isinstance(runner, Runner)
    return runner


def ask_mixed(driver: Driver, seed: int, max_tokens: int = 12) -> list[Reply]:
    """Cold and hot pictures and texts, greedy in every way, more at once than there are slots."""
    prompts = draw_prompts(seed=seed, count=48, most_vision_tokens=100)
    replies = []
    for _ in range(2):
        sent = [driver.submit(p, max_tokens, **OPTIONS[i % len(OPTIONS)]) for i, p in enumerate(prompts)]
        replies += [reply.wait() for reply in sent]
    return replies


def test_tokens_with_graphs_are_those_of_eager_steps_and_of_the_plain_loop_on_plain_operators(driver: Driver) -> None:
    replies = ask_mixed(driver, seed=1)
    with engine_on_gpu(engine__graphs=False) as eager:
        assert eager.engine.info.graphs == 0
        assert agreement(replies, tokens_of(ask_mixed(eager, seed=1))) >= LEAST_AGREEMENT
        assert eager.counters()["eager_steps"] > 10 * driver.counters()["eager_steps"]
    plain = {"model__backend": "torch", "engine__overlap": False, "kv__prefix_cache": False}
    with engine_on_gpu(engine__chunk_tokens=64, **plain) as twin:
        assert agreement(replies, tokens_of(ask_mixed(twin, seed=1))) >= LEAST_AGREEMENT


def test_decodes_by_the_heads_fp8_copy_are_replayed_and_say_what_the_head_says(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, replayed = runner_of(driver).graphs, set[tuple[bool, bool]]()
    replay = graphs.replay

    def watched(size: StepSize) -> StepOutput:
        replayed.add((size.each_row_draws, size.greedy))
        return replay(size)

    monkeypatch.setattr(graphs, "replay", watched)
    alone = [driver.ask(["Hello!"], 20)]
    assert (True, True) in replayed
    mixed = ask_mixed(driver, seed=1)
    assert replayed == {(True, True), (True, False), (False, False)}
    with engine_on_gpu(model__fp8_head="off") as plain:
        assert plain.engine.info.graphs < driver.engine.info.graphs
        expected = tokens_of([plain.ask(["Hello!"], 20), *ask_mixed(plain, seed=1)])
    assert agreement(alone + mixed, expected) >= LEAST_AGREEMENT


def test_seeded_draws_of_a_request_alone_repeat_themselves_in_graphs(driver: Driver) -> None:
    driver.ask(["Hello!"], 1)  # hot from now on, so that every run takes the same graphs
    asked = [driver.ask(["Hello!"], 40, seed=seed, **WILD).tokens for seed in (1, 2, 1)]
    assert asked[0] == asked[2] != asked[1]
    beside = [driver.submit(["Hello!"], 40, seed=seed, **WILD) for seed in range(10, 10 + MAX_SEQUENCES)]
    assert len({tuple(reply.wait().tokens) for reply in beside}) == MAX_SEQUENCES


def test_no_step_is_eager_however_long_the_prompt(driver: Driver) -> None:
    before = driver.counters()["eager_steps"]
    parts = [*small_pictures(33, 2), "What is shown?"]
    assert driver.ask(parts, 8).usage.prompt_tokens <= MAX_ROWS
    driver.ask([*parts[:2], "Is it red?"], 8)
    driver.ask_all([["Hello!"], ["Hi"], parts], 8)
    assert driver.ask(["word " * 300], 2, ignore_eos=True).usage.prompt_tokens > MAX_ROWS
    assert driver.counters()["eager_steps"] == before


def test_serving_a_new_length_compiles_nothing(driver: Driver) -> None:
    from triton import knobs

    compiled: list[object] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(args)
    try:
        rng = random.Random(3)
        for seed in range(4):
            texts = [["word " * rng.randint(1, 400)] for _ in range(rng.randint(1, 9))]
            sent = [driver.submit(parts, rng.randint(1, 30), ignore_eos=True) for parts in texts]
            sent += [driver.submit(p, 9, **WILD) for p in draw_prompts(60 + seed, 3, most_vision_tokens=150)]
            for reply in sent:
                reply.wait()
        driver.settle()
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert compiled == []


def test_a_long_random_run_with_preemption_and_swaps_says_what_a_roomy_engine_says() -> None:
    rng = random.Random(4)
    prompts = [["Hello! " * rng.randint(1, 30) + str(i)] for i in range(40)]
    wanted = [(parts, rng.randint(20, 120)) for parts in prompts]

    def ask(driver: Driver) -> list[Reply]:
        sent = [driver.submit(parts, most, ignore_eos=True) for parts, most in wanted]
        return [reply.wait() for reply in sent]

    small: dict[str, Any] = {"kv__page_tokens": 16, "engine__max_context_tokens": 400}
    with engine_on_gpu(**small) as roomy:
        expected = ask(roomy)
    host_bytes = pool_bytes(60, **ON_GPU | small)
    with engine_on_gpu(num_pages=26, kv__host_bytes=host_bytes, **small) as tight:
        replies = ask(tight)
        counters = tight.counters()
        assert counters["preemptions"] > 0
        assert counters["swapped_in_pages"] > 0
    assert agreement(replies, tokens_of(expected)) >= LEAST_AGREEMENT


def decode_plan(step: int, params: SamplingParams) -> StepPlan:
    """A decode of two slots, whatever token is there, in pages that no request has come to."""
    positions = np.zeros((3, 1), dtype=np.int32)
    return StepPlan(
        step,
        slot_starts=tuple(SlotStart(slot, params, slot, np.zeros(3, dtype=np.int32), (1,)) for slot in range(2)),
        pages=tuple(PageAssignment(slot, 0, NUM_PAGES - 1 - slot) for slot in range(2)),
        sequences=tuple(SequenceRows(slot, 3, 1, None, positions, 1) for slot in range(2)),
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9),
        SamplingParams(max_tokens=9, repetition_penalty=1.2, logprobs=3, min_tokens=4),
    ],
    ids=["greedy", "random", "everything"],
)
def test_a_launch_returns_while_the_device_still_works_on_what_came_before(
    driver: Driver, params: SamplingParams
) -> None:
    """Also: no call on the way waits for the device, by torch's own check."""
    runner = runner_of(driver)
    driver.settle()
    assert runner._stream is not None
    runner.launch(decode_plan(1, params)).wait()
    with torch.cuda.stream(runner._stream):
        torch.cuda._sleep(400_000_000)
        busy = torch.cuda.Event()
        busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = runner.launch(decode_plan(2, params))
        assert isinstance(step, RunningStep)
        assert not busy.query(), "the launch has waited"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(step.wait().token_ids) == 2


def test_a_cold_request_with_pictures_makes_no_call_that_waits_for_the_device(driver: Driver) -> None:
    runner, errors = runner_of(driver), []
    start = runner.start
    driver.ask([*small_pictures(40, 2), "What is shown?"], 4)  # what is made once is made

    def strict(plan: StepPlan) -> RunningStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return start(plan)
        except RuntimeError as error:
            errors.append(error)
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.start = strict  # type: ignore[method-assign]
    try:
        driver.ask([*small_pictures(41, 2), "What is shown?"], 4, logprobs=2)
        driver.ask_all([["Hello!"], ["Hi " * 300], [*small_pictures(41, 2), "Is it red?"]], 8)
    finally:
        runner.start = start  # type: ignore[method-assign]
    assert errors == []


def told_plan(step: int, num_sequences: int, num_rows: int) -> StepPlan:
    """A step that depends on nothing before it: so many rows of each sequence, from its start, of given tokens."""
    slots, positions = range(num_sequences), np.tile(np.arange(num_rows, dtype=np.int32), (3, 1))
    ids = [np.arange(num_rows, dtype=np.int32) + 7 * slot + 20 for slot in slots]
    params = SamplingParams(max_tokens=1, logprobs=5)
    return StepPlan(
        step,
        slot_starts=tuple(SlotStart(slot, params, 0, ids[slot]) for slot in slots),
        pages=tuple(PageAssignment(slot, 0, NUM_PAGES - 1 - slot) for slot in slots),
        sequences=tuple(SequenceRows(slot, 0, num_rows, ids[slot], positions, 0) for slot in slots),
    )


@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_replay_gives_the_log_probabilities_of_the_eager_step(driver: Driver, num_rows: int) -> None:
    """Also after another graph of the pool has run in between, whose memory they share."""
    runner = runner_of(driver)
    driver.settle()
    graphs = runner.graphs
    for step, num_sequences in enumerate((*range(1, MAX_SEQUENCES + 1), 3, 1)):
        replayed = runner.launch(told_plan(2 * step + 1, num_sequences, num_rows)).wait()
        runner.use_graphs(GraphFamily({}))
        eager = runner.launch(told_plan(2 * step + 2, num_sequences, num_rows)).wait()
        runner.use_graphs(graphs)
        assert (replayed.eager, eager.eager) == (False, True)
        for one, other in zip(replayed.logprobs, eager.logprobs, strict=True):
            assert one is not None
            assert other is not None
            assert [logprob for _, logprob in one.top] == pytest.approx([x for _, x in other.top], abs=0.05)


def test_pages_are_sized_from_what_was_measured_and_a_full_load_stays_within_it() -> None:
    dotted = {name: value for name, value in ON_GPU.items() if name != "engine__max_step_tokens"}
    card_bytes = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    fraction = 0.2
    with running_engine(kv__memory_fraction=fraction, **dotted) as driver:
        memory = driver.engine.info.memory
        assert memory["usable_bytes"] == pytest.approx(card_bytes * fraction, abs=1)
        assert driver.engine.info.total_pages * 64 * driver.engine.info.bytes_per_token <= memory["pool_bytes"]
        assert min(memory["step_bytes"], memory["weight_bytes"]) > 0
        driver.ask_all([["word " * 2600] for _ in range(9)], 4)
        driver.ask_all(draw_prompts(7, 30, most_vision_tokens=400), 10, logprobs=20, temperature=1.0)
        assert torch.cuda.max_memory_reserved() <= memory["usable_bytes"]


def test_no_global_torch_state_differs_after_a_start_on_a_gpu() -> None:
    before = torch_state()
    with engine_on_gpu() as driver:
        assert torch_state() == before
        driver.ask([*small_pictures(1, 1), "What is shown?"], temperature=1.0, seed=3)
        assert torch_state() == before
    assert torch_state() == before


def torch_state() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.cuda.current_device(),
        torch.cuda.current_stream(),
        torch.cuda.get_rng_state().tolist(),
        torch.random.get_rng_state().tolist(),
    )
