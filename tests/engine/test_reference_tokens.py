"""Greedy tokens equal Hugging Face's, with FP32 pages, however the engine gets to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import Driver, Parts, running_engine
from reference import DEMO_CHECKPOINT
from reference_answers import Reference, draw_prompts, save_tiny_checkpoint

from prism_server.engine.messages import Usage

NUM_PROMPTS, NUM_VARIED = 300, 60
MAX_TOKENS = 12
VARIANTS: dict[str, dict[str, Any]] = {
    "plain loop": {"engine__overlap": False},
    "chunks of 16": {"engine__chunk_tokens": 16},
    "no prefix cache": {"kv__prefix_cache": False},
    "everything plain": {"engine__overlap": False, "kv__prefix_cache": False, "engine__max_running_sequences": 1},
    "pages of 64": {"kv__page_tokens": 64},
    "odd pages and chunks": {"kv__page_tokens": 7, "engine__chunk_tokens": 23},
    "small pool with a host tier": {"num_pages": 60, "kv__host_bytes": 64 << 20, "engine__chunk_tokens": 48},
}


@dataclass(frozen=True)
class Expected:
    """Prompts and the reference's answers to them."""

    path: str
    prompts: list[Parts]
    answers: list[list[int]]
    ignore_eos: bool = False

    def check(self, driver: Driver, count: int, together: bool) -> list[Usage]:
        """Ask the first `count` prompts and compare the tokens."""
        asked = self.prompts[:count]
        if together:
            replies = driver.ask_all(asked, MAX_TOKENS, ignore_eos=self.ignore_eos)
        else:
            replies = [driver.ask(parts, MAX_TOKENS, ignore_eos=self.ignore_eos) for parts in asked]
        wrong = [
            (number, reply.tokens, answer)
            for number, (reply, answer) in enumerate(zip(replies, self.answers[:count], strict=True))
            if reply.tokens != answer
        ]
        assert not wrong, f"{len(wrong)} of {count}: {wrong[:5]}"
        return [reply.usage for reply in replies]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For the reference: on a shared machine more threads wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def demo(one_thread: None) -> Expected:
    reference = Reference(DEMO_CHECKPOINT)
    prompts = draw_prompts(seed=1, count=NUM_PROMPTS)
    return Expected("demo", prompts, [reference.greedy(parts, MAX_TOKENS) for parts in prompts])


@pytest.fixture(scope="module", params=["2b", "8b"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Expected:
    """Random weights, so random answers: equal ones are no luck. Never ends by itself."""
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_checkpoint(request.param, directory)
    reference = Reference(directory)
    prompts = draw_prompts(seed=2, count=NUM_VARIED, most_vision_tokens=200)
    answers = [reference.greedy(parts, MAX_TOKENS, ignore_eos=True) for parts in prompts]
    assert len({tuple(answer) for answer in answers}) > NUM_VARIED / 2
    return Expected(str(directory), prompts, answers, ignore_eos=True)


def test_generated_prompts_in_one_batch_cold_and_hot_give_the_references_tokens(demo: Expected) -> None:
    with running_engine(engine__max_waiting_requests=NUM_PROMPTS) as driver:
        demo.check(driver, NUM_PROMPTS, together=True)
        hot = demo.check(driver, NUM_PROMPTS, together=True)
        assert not any(usage.encoded_items or usage.prefilled_media_tokens for usage in hot)


def test_generated_prompts_one_by_one_cold_give_the_references_tokens(demo: Expected) -> None:
    with running_engine(kv__prefix_cache=False) as driver:
        assert not any(usage.cached_tokens for usage in demo.check(driver, NUM_VARIED, together=False))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_through_the_engine_gives_the_references_tokens(demo: Expected, variant: str) -> None:
    with running_engine(**VARIANTS[variant]) as driver:
        demo.check(driver, NUM_VARIED, together=True)
        again = demo.check(driver, NUM_VARIED // 4, together=False)
        assert any(usage.cached_tokens for usage in again) == VARIANTS[variant].get("kv__prefix_cache", True)


def test_a_random_tiny_model_gives_the_references_tokens_batched_alone_cold_and_hot(tiny: Expected) -> None:
    with running_engine(model__path=tiny.path) as driver:
        tiny.check(driver, NUM_VARIED, together=True)
        assert any(usage.cached_tokens for usage in tiny.check(driver, NUM_VARIED, together=False))
        driver.engine.reset_cache()
        tiny.check(driver, NUM_VARIED, together=False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_random_tiny_model_gives_the_references_tokens_every_way(tiny: Expected, variant: str) -> None:
    with running_engine(model__path=tiny.path, **VARIANTS[variant]) as driver:
        tiny.check(driver, NUM_VARIED, together=True)
