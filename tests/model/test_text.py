"""The whole model's logits against Hugging Face transformers, for any cut of the prompt into steps."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from reference import DEMO_CHECKPOINT, Prompt, Session, demo_model, make_prompt, tiny_model
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from prism_server.capacity.page_layout import KVDtype
from prism_server.model import Qwen3VL
from prism_server.model.mrope import MRope
from prism_server.ops import make_ops

Pair = tuple[Qwen3VLForConditionalGeneration, Qwen3VL]
EXACT = 1e-4
"""Largest difference of any logit with FP32 pages, in units of the largest logit (the demo model's: 19) if that is over
one: what sums in another order are off by grows with their terms. Measured: at most 5e-6, on one thread and on two.
"""
STORAGE_BOUND: dict[KVDtype, float] = {"bf16": 0.01, "fp8": 0.12}
"""Root mean square of the logits' error, in standard deviations of the logits. A BF16 row is off by up to 2^-8 of its
values and an FP8 one by 2^-4; the layers pass a row's relative error on to the logits about once over. Measured on the
three models: at most 0.0028 and 0.041; the bounds leave threefold room.
"""
ORDER_BOUND: dict[KVDtype, float] = {"fp32": 1e-5, "bf16": 0.0008, "fp8": 0.004}
"""The same measure, between two cuts of one prompt. Measured: at most 1.1e-6, 0.00018 and 0.00037."""
MORE = [3, 5, 7, 11]
"""Tokens that follow a prompt, as if they had been decoded."""


@pytest.fixture(scope="module", params=["2b", "8b", "demo"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if request.param == "demo":
        reference, directory = demo_model(), DEMO_CHECKPOINT
    else:
        reference, directory = tiny_model(request.param), tmp_path_factory.mktemp(request.param)
        reference.save_pretrained(directory)
    return reference, Qwen3VL.load(directory, "cpu", torch.float32, make_ops("torch", "cpu"))


@cache
def two_pictures(reference: Qwen3VLForConditionalGeneration) -> tuple[Prompt, Tensor]:
    """48 rows: pictures of 12 and 4 tokens at rows 8 to 19 and 29 to 32; the reference's logits, `MORE` included."""
    prompt = make_prompt(reference, [(1, 6, 8), (1, 4, 4)], seed=1)
    return prompt, prompt.reference_logits(reference, MORE)


def run(model: Qwen3VL, prompt: Prompt, ends: list[int], kv_dtype: KVDtype = "fp32", page_tokens: int = 16) -> Tensor:
    """Logits of all rows up to ends[-1], computed in steps that end there."""
    session = Session(model, [prompt], page_tokens, kv_dtype)
    session.ids[0] += MORE
    return torch.cat([session.step({0: end}) for end in ends])


def assert_exact(logits: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(logits, expected, rtol=0, atol=EXACT * scale)


def rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


def test_a_whole_prefill_gives_the_references_logits(pair: Pair) -> None:
    reference, model = pair
    prompt, expected = two_pictures(reference)
    length = len(prompt.ids)
    assert_exact(run(model, prompt, [length]), expected[:length])


def test_text_alone_gives_the_references_logits(pair: Pair) -> None:
    reference, model = pair
    prompt = make_prompt(reference, [], seed=2, text_tokens=40)
    assert_exact(run(model, prompt, [40]), prompt.reference_logits(reference))


@pytest.mark.parametrize("page_tokens", [1, 5, 16])
def test_chunks_that_cut_a_picture_anywhere_and_decode_steps_give_the_references_logits(
    pair: Pair, page_tokens: int
) -> None:
    reference, model = pair
    prompt, expected = two_pictures(reference)
    length = len(prompt.ids)
    source = random.Random(page_tokens)
    cuts = sorted({9, 14, 30, *source.sample(range(1, length), 3)})  # 9, 14 and 30 lie inside the pictures
    ends = [*cuts, *range(length, length + len(MORE) + 1)]
    assert_exact(run(model, prompt, ends, page_tokens=page_tokens), expected)


def test_prompts_in_one_batch_prefilling_and_decoding_side_by_side_give_the_references_logits(pair: Pair) -> None:
    reference, model = pair
    prompts = [
        make_prompt(reference, [(1, 4, 4), (1, 2, 6)], seed=3),
        make_prompt(reference, [], seed=4, text_tokens=9),
        make_prompt(reference, [(1, 8, 6)], seed=5),
    ]
    session = Session(model, prompts, 4, "fp32")
    for ids in session.ids:
        ids += MORE
    lengths = [len(prompt.ids) for prompt in prompts]
    steps = [
        {0: 11, 1: 9},  # a cut inside the first picture beside a whole prompt
        {0: lengths[0], 1: 10, 2: 3},
        {0: lengths[0] + 1, 1: 11, 2: 20},
        {1: 12, 2: lengths[2]},
        {0: lengths[0] + 2, 1: 13, 2: lengths[2] + 1},
    ]
    got: list[list[Tensor]] = [[], [], []]
    for ends in steps:
        counts = [ends[s] - session.computed[s] for s in sorted(ends)]
        for s, part in zip(sorted(ends), session.step(ends).split(counts), strict=True):
            got[s].append(part)
    for prompt, parts in zip(prompts, got, strict=True):
        rows = torch.cat(parts)
        assert_exact(rows, prompt.reference_logits(reference, MORE)[: len(rows)])


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_narrow_pages_stay_within_their_stated_bound(pair: Pair, kv_dtype: KVDtype) -> None:
    reference, model = pair
    prompt, expected = two_pictures(reference)
    error = run(model, prompt, [len(prompt.ids)], kv_dtype) - expected[: len(prompt.ids)]
    assert rms(error) <= STORAGE_BOUND[kv_dtype] * float(expected.std())


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16", "fp32"])
def test_chunked_whole_mixed_and_alone_give_the_same_logits_because_queries_attend_to_what_is_stored(
    pair: Pair, kv_dtype: KVDtype
) -> None:
    """They differ by the order of sums, and by the few stored values that this tips over to the next number.

    If a chunk saw its own rows unrounded, the difference would be of the size of the rounding itself.
    """
    reference, model = pair
    prompt, expected = two_pictures(reference)
    length = len(prompt.ids)
    whole = run(model, prompt, [length], kv_dtype)
    chunked = run(model, prompt, [*range(3, length, 3), length], kv_dtype)
    session = Session(model, [make_prompt(reference, [(1, 4, 4)], seed=6), prompt], 16, kv_dtype)
    mixed = session.step({0: 12, 1: length})[12:]
    for other in (chunked, mixed):
        assert rms(other - whole) <= ORDER_BOUND[kv_dtype] * float(expected.std())


def test_each_deepstack_level_is_added_after_its_own_layer(pair: Pair) -> None:
    """The levels are not interchangeable: another order is seen in the logits."""
    reference, model = pair
    prompt, expected = two_pictures(reference)
    session = Session(model, [prompt], 16, "fp32")
    features = session.features[0]
    assert features is not None
    session.features = [type(features)(features.main, tuple(reversed(features.deepstack)))]
    logits = session.step({0: len(prompt.ids)})
    assert float((logits - expected[: len(prompt.ids)]).abs().max()) > 100 * EXACT


def test_cos_and_sin_are_the_references(pair: Pair) -> None:
    reference, model = pair
    positions = torch.randint(0, 5000, (3, 50), generator=torch.Generator().manual_seed(0))
    cos, sin = MRope(model.config.text, "cpu")(positions)
    expected = reference.model.language_model.rotary_emb(torch.zeros(1), positions.unsqueeze(1))
    for ours, theirs in zip((cos, sin), expected, strict=True):
        assert torch.equal(torch.cat((ours, ours), dim=1), theirs[0])


def test_a_model_in_bfloat16_stays_near_the_float32_one() -> None:
    reference = demo_model()
    prompt, expected = two_pictures(reference)
    model = Qwen3VL.load(DEMO_CHECKPOINT, "cpu", torch.bfloat16, make_ops("torch", "cpu"))
    logits = run(model, prompt, [20, len(prompt.ids)], "bf16")
    assert logits.dtype == torch.float32
    # Measured 0.0056: eight bits of significand in every activation of six layers.
    assert rms(logits - expected[: len(prompt.ids)]) <= 0.02 * float(expected.std())


def test_no_global_torch_state_differs_after_loading_and_running(tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        return (
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.random.get_rng_state().tolist(),
        )

    reference = tiny_model("2b")
    reference.save_pretrained(tmp_path)
    prompt = make_prompt(reference, [(1, 4, 4)], seed=7)
    before = state()
    model = Qwen3VL.load(tmp_path, "cpu", torch.bfloat16, make_ops("auto", "cpu"))
    Session(model, [prompt], 16, "fp8").step({0: len(prompt.ids)})
    assert state() == before


@pytest.mark.parametrize("kind", ["2b", "8b"])
def test_an_fp8_copy_of_a_tied_or_untied_head_names_the_heads_best_tokens(kind: str, tmp_path: Path) -> None:
    tiny_model(kind).save_pretrained(tmp_path)
    hidden = torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    ops = make_ops("torch", "cpu")
    for model in (
        Qwen3VL.load(tmp_path, "cpu", torch.float32, ops, fp8_head=True),
        Qwen3VL.random(tmp_path, "cpu", torch.float32, ops, fp8_head=True),
    ):
        assert model.text.has_fp8_head
        assert torch.equal(model.text.best_tokens(hidden), model.text.logits(hidden).argmax(dim=-1))
