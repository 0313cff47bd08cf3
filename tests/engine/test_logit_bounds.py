"""How far the engine's logits may be from the reference's, and from its own, for each KV type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from engine_support import Driver, Parts, Reply, running_engine
from reference import DEMO_CHECKPOINT
from reference_answers import Reference, draw_prompts, save_tiny_checkpoint, small_pictures
from torch import Tensor

from prism_server.capacity.page_layout import KVDtype

KV_DTYPES: tuple[KVDtype, ...] = ("fp32", "bf16", "fp8")
MAX_TOKENS, TOP = 12, 20

# Natural-log probabilities of the 20 most likely tokens; the logits of these models have a deviation of about one.
REFERENCE_BOUND: dict[KVDtype, float] = {"fp32": 1e-4, "bf16": 0.05, "fp8": 0.6}
"""Largest distance from the reference. Measured: 6e-6, 0.017 and 0.23."""
ORDER_BOUND: dict[KVDtype, float] = {"fp32": 1e-4, "bf16": 0.002, "fp8": 0.03}
"""Largest distance between two ways to the same row: the order of sums, and the few stored values that it tips over to
the next number. Measured: 5e-6, 0.0004 and 0.011; what the rounding itself does is an order of magnitude more."""
MOST_EXEMPT_SHARE: dict[KVDtype, float] = {"fp32": 0.01, "bf16": 0.01, "fp8": 0.06}
"""Positions where another token was drawn because the reference's top two are closer than the bound. Random models are
undecided more often than trained ones: measured 0, 0 and 4 %; the demo model is held to 1 % with each type."""


@dataclass(frozen=True)
class Case:
    path: str
    reference: Reference
    prompts: list[Parts]


@pytest.fixture(scope="module", params=["2b", "8b"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save_tiny_checkpoint(request.param, directory, seed=3)
    return Case(str(directory), Reference(directory), draw_prompts(seed=5, count=24, most_vision_tokens=200))


def ask(driver: Driver, prompts: Sequence[Parts], together: bool) -> list[Reply]:
    options = {"logprobs": TOP, "ignore_eos": True}
    if together:
        return driver.ask_all(prompts, MAX_TOKENS, **options)
    return [driver.ask(parts, MAX_TOKENS, **options) for parts in prompts]


def every_way(case: Case, kv_dtype: KVDtype) -> dict[str, list[Reply]]:
    """The same prompts cold, hot, chunked, whole, mixed with others and alone."""
    ways: dict[str, list[Reply]] = {}
    with running_engine(model__path=case.path, kv__dtype=kv_dtype) as driver:
        ways["mixed, cold"] = ask(driver, case.prompts, together=True)
        ways["alone, hot"] = ask(driver, case.prompts, together=False)
        assert any(reply.usage.cached_tokens for reply in ways["alone, hot"])
        ways["mixed, hot"] = ask(driver, case.prompts, together=True)
    with running_engine(model__path=case.path, kv__dtype=kv_dtype, kv__prefix_cache=False) as driver:
        ways["alone, cold, whole"] = ask(driver, case.prompts, together=False)
    with running_engine(
        model__path=case.path, kv__dtype=kv_dtype, kv__page_tokens=8, engine__chunk_tokens=16
    ) as driver:
        ways["mixed, chunked"] = ask(driver, case.prompts, together=True)
    return ways


def distance(reply: Reply, logprobs: Tensor) -> float:
    """Largest one between the alternatives of each token and the reference's rows [tokens, vocabulary]."""
    rows = [(dict(one.top), row) for one, row in zip(reply.logprobs, logprobs, strict=True)]
    return max(float((torch.tensor(list(top.values())) - row[list(top)]).abs().max()) for top, row in rows)


def exempt_positions(tokens: Sequence[int], logits: Tensor, bound: float) -> int:
    """Positions whose token is not the reference's; its top two must be within the bound there."""
    best = logits.topk(2, dim=-1)
    exempt = 0
    for token, ids, (first, second) in zip(tokens, best.indices.tolist(), best.values.tolist(), strict=True):
        if token != ids[0]:
            assert first - second <= bound, f"{token} instead of {ids[0]}, which leads by {first - second}"
            exempt += 1
    return exempt


def between(one: Reply, other: Reply) -> float:
    """Largest distance at alternatives that both name, up to the first token in which they differ."""
    found = 0.0
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        ours, theirs = dict(left.top), dict(right.top)
        found = max([found, *(abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys())])
        if left.token_id != right.token_id:
            break
    return found


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_cold_hot_chunked_whole_mixed_and_alone_give_the_same_logits_within_the_bound_of_the_kv_type(
    case: Case, kv_dtype: KVDtype
) -> None:
    """Queries attend to what is stored. If they saw their own rows unrounded, narrow types would differ by far more."""
    ways = every_way(case, kv_dtype)
    plain = ways.pop("alone, cold, whole")
    for way, replies in ways.items():
        distances = [between(one, other) for one, other in zip(replies, plain, strict=True)]
        assert max(distances) <= ORDER_BOUND[kv_dtype], way


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_logits_are_the_references_within_the_bound_and_tokens_wherever_its_top_two_are_further_apart(
    case: Case, kv_dtype: KVDtype
) -> None:
    """Each token is judged after the engine's own ones before it. Positions that the bound exempts are counted."""
    bound = REFERENCE_BOUND[kv_dtype]
    with running_engine(model__path=case.path, kv__dtype=kv_dtype) as driver:
        replies = ask(driver, case.prompts, together=True)
    exempt = 0
    for parts, reply in zip(case.prompts, replies, strict=True):
        logits = case.reference.logits(parts, reply.tokens)
        assert distance(reply, logits.log_softmax(dim=-1)) <= bound
        exempt += exempt_positions(reply.tokens, logits, bound)
    positions = MAX_TOKENS * len(replies)
    assert exempt <= MOST_EXEMPT_SHARE[kv_dtype] * positions, f"{exempt} of {positions}"


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_the_demo_models_tokens_are_the_references_with_narrow_pages(kv_dtype: KVDtype) -> None:
    reference, prompts = Reference(DEMO_CHECKPOINT), draw_prompts(seed=6, count=40, most_vision_tokens=200)
    with running_engine(kv__dtype=kv_dtype) as driver:
        replies = driver.ask_all(prompts, MAX_TOKENS)
    exempt = 0
    for parts, reply in zip(prompts, replies, strict=True):
        exempt += exempt_positions(reply.tokens, reference.logits(parts, reply.tokens), REFERENCE_BOUND[kv_dtype])
    positions = sum(len(reply.tokens) for reply in replies)
    assert exempt <= 0.01 * positions, f"{exempt} of {positions}"


@pytest.mark.parametrize("threads", [0, 1])
def test_no_global_torch_state_default_device_default_dtype_deterministic_flags_differs_after_the_engine_has_started(
    threads: int,
) -> None:
    before = torch_state()
    with running_engine(model__threads=threads, kv__dtype="fp8") as driver:
        assert torch_state() == before
        driver.ask([*small_pictures(1, 1), "What is shown?"], temperature=1.0, seed=3)
        assert torch_state() == before
    assert torch_state() == before


def torch_state() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_num_threads(),
        torch.get_num_interop_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.random.get_rng_state().tolist(),
    )
