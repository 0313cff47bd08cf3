"""The page plan: its sum adds up, its suggestions work, its defaults are the server's."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_server.capacity.models import KNOWN_MODELS, Switch
from prism_server.capacity.plan import PlanRequest, plan_pages, suggestions
from prism_server.capacity.units import GIB
from prism_server.errors import StartupError
from prism_server.settings import ServerSettings

EIGHT_B = KNOWN_MODELS["8b"]


def test_the_8b_fits_an_h200_with_more_than_a_million_fp8_tokens() -> None:
    plan = plan_pages(PlanRequest(EIGHT_B, 141 * GIB))
    assert plan.fits
    assert 1_000_000 < plan.num_tokens < 141 * GIB / 76_032


@given(
    memory=st.integers(1, 300 * GIB),
    fraction=st.floats(0.05, 1.0),
    model=st.sampled_from(sorted(KNOWN_MODELS)),
    dtype=st.sampled_from(["fp8", "bf16", "fp32"]),
    page=st.sampled_from([16, 64, 128]),
)
def test_pages_and_reserve_never_exceed_the_usable_memory_and_one_more_page_would(
    memory: int, fraction: float, model: str, dtype: str, page: int
) -> None:
    plan = plan_pages(PlanRequest(KNOWN_MODELS[model], memory, fraction, dtype, page))  # type: ignore[arg-type]
    assert plan.usable_bytes <= memory * fraction + 1
    one_more = plan.reserved_bytes + (plan.num_pages + 1) * plan.layout.page_bytes
    assert one_more > plan.usable_bytes
    if plan.num_pages:
        assert one_more - plan.layout.page_bytes <= plan.usable_bytes


@given(memory=st.integers(1, 40 * GIB), fraction=st.floats(0.05, 1.0), ranks=st.sampled_from([1, 2, 4]))
def test_the_least_gpu_fits_and_one_byte_less_does_not(memory: int, fraction: float, ranks: int) -> None:
    request = PlanRequest(EIGHT_B, memory, fraction, tensor_parallel=ranks)
    least = plan_pages(request).least_gpu_memory_bytes
    assert plan_pages(replace(request, gpu_memory_bytes=least)).fits
    assert not plan_pages(replace(request, gpu_memory_bytes=least - 1)).fits


def test_every_suggestion_makes_the_plan_fit() -> None:
    request = PlanRequest(EIGHT_B, 29 * GIB, kv_dtype="bf16")
    assert not plan_pages(request).fits
    fp8, context, split, card = suggestions(request)
    assert fp8.startswith("FP8 KV")
    assert plan_pages(replace(request, kv_dtype="fp8")).fits
    shorter = int(re.sub(r"\D", "", context))
    assert plan_pages(replace(request, max_context_tokens=shorter)).fits
    assert not plan_pages(replace(request, max_context_tokens=shorter + 1)).fits
    assert split.startswith("tensor parallel over 2")
    assert plan_pages(replace(request, tensor_parallel=2)).fits
    gib = float(re.findall(r"[\d.]+", card)[0])
    assert plan_pages(replace(request, gpu_memory_bytes=int(gib * GIB))).fits


def test_a_copy_of_the_head_takes_room_from_the_pages_and_leaving_it_out_is_suggested() -> None:
    """151,936 rows of 4,096 bytes and a scale of 4 bytes: 0.58 GiB. A GPU's server has it unless told otherwise."""
    request = PlanRequest(EIGHT_B, 80 * GIB)
    plain, copied = plan_pages(replace(request, fp8_head="off")), plan_pages(request)
    assert copied.fp8_head_bytes == 151_936 * 4100 == plain.kv_bytes - copied.kv_bytes
    assert plan_pages(replace(request, fp8_head="on")).num_pages == copied.num_pages
    assert plan_pages(replace(request, tensor_parallel=2)).fp8_head_bytes == 151_936 * 2050
    assert ("FP8 head" in copied.explain(), "FP8 head" in plain.explain()) == (True, False)


@pytest.mark.parametrize("switch", ["auto", "on"])
def test_leaving_the_copy_out_is_suggested_where_that_alone_makes_it_fit(switch: Switch) -> None:
    request = PlanRequest(EIGHT_B, 80 * GIB, fp8_head=switch)
    least_bytes = plan_pages(replace(request, fp8_head="off")).least_gpu_memory_bytes
    tight = replace(request, gpu_memory_bytes=least_bytes)
    first, *_ = suggestions(tight)
    without = plan_pages(replace(tight, fp8_head="off"))
    assert first == f"model.fp8_head off, no FP8 copy of the LM head: {without.num_tokens:,} tokens fit"
    assert without.fits
    smaller = replace(tight, gpu_memory_bytes=least_bytes - 1)
    for useless in (smaller, replace(smaller, fp8_head="off")):
        assert not any("fp8_head" in suggestion for suggestion in suggestions(useless))


def test_changes_that_only_help_together_are_suggested_together() -> None:
    request = PlanRequest(EIGHT_B, 28 * GIB, kv_dtype="bf16")
    assert not any(plan_pages(replace(request, **change)).fits for change in ({"kv_dtype": "fp8"}, {"fp8_head": "off"}))
    first, *others = suggestions(request)
    both = plan_pages(replace(request, kv_dtype="fp8", fp8_head="off"))
    assert both.fits
    assert first == f"FP8 KV and model.fp8_head off: {both.num_tokens:,} tokens fit"
    assert not any("FP8" in other for other in others)


def test_a_head_without_tiles_or_in_fp32_has_no_copy_unless_it_is_asked_for() -> None:
    odd = replace(EIGHT_B, text=replace(EIGHT_B.text, hidden_size=4112))
    for request in (PlanRequest(odd, 80 * GIB), PlanRequest(EIGHT_B, 80 * GIB, weight_dtype="fp32")):
        assert plan_pages(request).fp8_head_bytes == 0
        assert "FP8 head" not in plan_pages(request).explain()
        assert plan_pages(replace(request, fp8_head="on")).fp8_head_bytes > 0


def test_only_what_helps_is_suggested() -> None:
    """32B on 17 GiB: FP8 KV alone does not help, nor does a shorter context; eight GPUs would."""
    heads = [suggestion.split(":")[0] for suggestion in suggestions(PlanRequest(KNOWN_MODELS["32b"], 17 * GIB))]
    assert heads[0] == "tensor parallel over 8 such GPUs, not served yet"
    assert len(heads) == 2


def test_the_explanation_names_every_term() -> None:
    text = plan_pages(PlanRequest(EIGHT_B, 16 * GIB, kv_dtype="bf16")).explain()
    terms = (
        "memory of one GPU",
        "usable",
        "weights",
        "activations",
        "vision encoder",
        "encoder outputs",
        "CUDA graphs",
    )
    for term in (*terms, "= for KV pages", "9,437,184 B", "does not fit", "GPU of at least"):
        assert term in text


def test_the_defaults_are_the_servers_own() -> None:
    plan, server = PlanRequest(EIGHT_B, GIB), ServerSettings()
    assert (plan.kv_dtype, plan.page_tokens) == (server.kv.dtype, server.kv.page_tokens)
    assert plan.memory_fraction == server.kv.memory_fraction
    assert plan.fp8_head == server.model.fp8_head
    assert plan.max_image_tokens == server.media.max_image_tokens
    assert plan.max_video_tokens == server.media.max_video_tokens
    for name in ("max_context_tokens", "max_step_tokens", "max_running_sequences", "feature_cache_bytes"):
        assert getattr(plan, name) == getattr(server.engine, name)


@pytest.mark.parametrize(
    ("model", "copied"),
    [
        ({}, True),
        ({"device": "cuda", "backend": "triton", "dtype": "bfloat16"}, True),
        ({"device": "cpu"}, False),
        ({"backend": "torch"}, False),
        ({"backend": "flashinfer"}, False),
        ({"dtype": "float32"}, False),
        ({"fp8_head": False}, False),
        ({"backend": "flashinfer", "fp8_head": True}, True),
        ({"device": "cpu", "fp8_head": "on"}, True),
    ],
)
def test_a_servers_copy_of_the_head_is_in_its_plan(model: dict[str, object], copied: bool) -> None:
    request = ServerSettings.model_validate({"model": model}).plan_request(EIGHT_B, 80 * GIB)
    plan = plan_pages(request)
    assert plan.fp8_head_bytes == (EIGHT_B.fp8_head_bytes() if copied else 0)
    assert plan.kv_bytes == plan_pages(replace(request, fp8_head="off")).kv_bytes - plan.fp8_head_bytes


@pytest.mark.parametrize(
    "change", [{"gpu_memory_bytes": 0}, {"memory_fraction": 1.5}, {"page_tokens": 0}, {"max_video_tokens": 0}]
)
def test_a_request_without_sense_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(StartupError):
        replace(PlanRequest(EIGHT_B, GIB), **change)


@pytest.mark.parametrize(
    ("image_tokens", "video_tokens", "encoded_tokens", "said"),
    [
        (4096, 12_288, 12_288, "one clip of 12,288 tokens"),
        (16_384, 12_288, 16_384, "one picture of 16,384 tokens"),
        (1024, 2048, 4096, "pictures of 4,096 tokens"),
    ],
)
def test_the_encoder_has_room_for_the_largest_item_of_either_kind_and_for_a_step_of_small_ones(
    image_tokens: int, video_tokens: int, encoded_tokens: int, said: str
) -> None:
    settings = ServerSettings.model_validate(
        {"media": {"max_image_tokens": image_tokens, "max_video_tokens": video_tokens}}
    )
    plan = plan_pages(settings.plan_request(EIGHT_B, 80 * GIB))
    assert plan.request.encoded_tokens == encoded_tokens
    assert said in plan.explain()
    alone = PlanRequest(EIGHT_B, 80 * GIB, max_image_tokens=encoded_tokens, max_video_tokens=1)
    assert plan.encoder_bytes == plan_pages(alone).encoder_bytes
