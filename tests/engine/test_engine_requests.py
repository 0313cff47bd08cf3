"""What requests get from a whole engine with the demo model, and what is left of them."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from engine_support import Driver, Parts, Reply, page_layout, running_engine, settings_with
from PIL import Image
from reference_answers import draw_prompts, small_pictures

from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample, encode_jpeg, encode_png
from prism_server.engine.engine import Engine
from prism_server.engine.executor import StepHandle
from prism_server.engine.plan import StepPlan
from prism_server.engine.sequence import Phase
from prism_server.errors import BadRequest, EngineFault, PrismError
from prism_server.model.vision import Features, VisionState, VisionTower

SEEN = "Describe what you see."
PICTURE_TOKENS = 9
"""Of a picture of 96 x 96 pixels."""


def plain_picture(color: tuple[int, int, int], size: int = 96) -> bytes:
    return encode_png(Image.new("RGB", (size, size), color))


def groups_of_pictures(seed: int, groups: int, each: int) -> list[list[bytes]]:
    pictures = small_pictures(seed, groups * each)
    return [pictures[i : i + each] for i in range(0, len(pictures), each)]


def tokens_of(replies: Sequence[Reply]) -> list[list[int]]:
    return [reply.tokens for reply in replies]


def alone(prompts: Sequence[Parts], max_tokens: int = 12, **params: Any) -> list[list[int]]:
    """The answers of an engine with room for everything that is asked one thing at a time and remembers nothing."""
    with running_engine(kv__prefix_cache=False) as driver:
        return [driver.ask(parts, max_tokens, **params).tokens for parts in prompts]


# -- what is reused --------------------------------------------------------------------------------------------------


def test_two_items_with_equal_placeholder_tokens_never_share_kv() -> None:
    """A, B, A with a red and a blue picture of one size: the prompts' ids are equal, the answers are not."""
    red, blue = plain_picture((220, 40, 40)), plain_picture((40, 70, 220))
    with running_engine() as driver:
        first, other, again = (driver.ask([picture, SEEN], logprobs=5) for picture in (red, blue, red))
        assert first.prompt.token_ids.tolist() == other.prompt.token_ids.tolist()
        assert other.prompt.page_keys != first.prompt.page_keys
        assert other.usage.cached_media_tokens == 0
        assert other.usage.prefilled_media_tokens == PICTURE_TOKENS
        assert [one.top for one in other.logprobs] != [one.top for one in first.logprobs]
        assert again.usage.cached_media_tokens == PICTURE_TOKENS
        assert (again.usage.prefilled_media_tokens, again.usage.encoded_items, again.usage.decoded_items) == (0, 0, 0)
        assert again.tokens == first.tokens


def test_the_same_picture_after_another_left_context_is_computed_anew() -> None:
    a, b = small_pictures(1, 2)
    prompts: list[Parts] = [(a, b, SEEN), (b, a, SEEN), (a, b, SEEN), ("Look: ", a, b, SEEN)]
    with running_engine() as driver:
        replies = [driver.ask(parts) for parts in prompts]
        assert tokens_of(replies) == alone(prompts)
        assert [reply.usage.prefilled_media_tokens for reply in replies] == [18, 18, 0, 18]
        assert [reply.usage.encoded_items for reply in replies] == [2, 0, 0, 0]  # features do not depend on it


def test_a_picture_that_comes_twice_in_one_prompt_is_encoded_once() -> None:
    a, b = small_pictures(2, 2)
    parts = (a, b, a, a, SEEN)
    with running_engine() as driver:
        reply = driver.ask(parts)
        assert (reply.usage.encoded_items, reply.usage.decoded_items) == (2, 2)
        assert [reply.tokens] == alone([parts])


def test_a_second_question_after_the_same_pictures_computes_no_media_row_wherever_they_end_in_a_page() -> None:
    for page_tokens in (3, 16, 64):
        with running_engine(kv__page_tokens=page_tokens) as driver:
            for count in (1, 2, 3):
                pictures = small_pictures(count, count)
                driver.ask([*pictures, SEEN])
                second = driver.ask([*pictures, "How many pictures are there?"])
                assert second.usage.cached_media_tokens == count * PICTURE_TOKENS
                assert (second.usage.prefilled_media_tokens, second.usage.encoded_items) == (0, 0)


@pytest.mark.parametrize("overlap", [True, False])
def test_thirty_two_identical_requests_at_once_equal_the_serial_answer(overlap: bool) -> None:
    parts = (*small_pictures(4, 2), SEEN)
    with running_engine(engine__overlap=overlap) as driver:
        replies = driver.ask_all([parts] * 32, 20)
        assert tokens_of(replies) == alone([parts], 20) * 32
        counters = driver.counters()
        assert (counters["encoded_items"], counters["decoded_items"]) == (2, 2)
        assert counters["prefilled_media_tokens"] == 2 * PICTURE_TOKENS


def test_thirty_two_simultaneous_requests_over_eight_new_media_groups_compute_eight_prefixes() -> None:
    groups = groups_of_pictures(5, groups=8, each=2)
    questions = ["How many pictures are there?", SEEN, "What is shown?", "Which shapes are there?"]
    prompts: list[Parts] = [(*group, question) for question in questions for group in groups]
    with running_engine() as driver:
        replies = driver.ask_all(prompts)
        counters = driver.counters()
        assert (counters["encoded_items"], counters["decoded_items"]) == (16, 16)
        assert counters["prefilled_media_tokens"] == 16 * PICTURE_TOKENS
        assert counters["prefix_hit_media_tokens"] == 24 * 2 * PICTURE_TOKENS
        assert tokens_of(replies) == alone(prompts)


def test_a_leaders_cancellation_loses_none_of_those_that_wait() -> None:
    groups = groups_of_pictures(6, groups=3, each=3)
    prompts: list[Parts] = [(*group, SEEN) for group in groups for _ in range(5)]
    with running_engine(engine__chunk_tokens=8) as driver:
        replies = [driver.submit(parts) for parts in prompts]
        for leader in replies[::5]:
            driver.engine.cancel(leader.request_id)
        rest = [reply.wait() for i, reply in enumerate(replies) if i % 5]
        expected = alone(prompts[::5])
        assert tokens_of(rest) == [tokens for tokens in expected for _ in range(4)]


# -- chunks, small pools, preemption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [16, 33, 64])
def test_a_hit_that_ends_inside_a_picture_resumes_at_that_row(chunk_tokens: int) -> None:
    """Other prompts take some of the pages back: what is left of the eight pages' prefix ends anywhere."""
    rng = random.Random(7)
    sample = draw_sample(rng, LAYOUT_BY_NAME["pages-2-mixed"])
    parts = (*map(encode_png, sample.pictures), sample.turns[0].question)
    (expected,) = alone([parts])
    inside = 0
    with running_engine(num_pages=20, engine__chunk_tokens=chunk_tokens) as driver:
        assert driver.ask(parts).tokens == expected
        for count in range(1, 9):
            driver.ask([f"{count}" + " 1" * (16 * count)], 2)
            reply = driver.ask(parts)
            assert reply.tokens == expected
            spans = reply.prompt.spans
            inside += any(span.start < reply.usage.cached_tokens < span.end for span in spans)
    assert inside > 0


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_two_prompts_in_one_batch_get_the_answers_that_each_gets_alone(chunk_tokens: int) -> None:
    prompts = draw_prompts(seed=11, count=16, most_vision_tokens=200)
    expected = alone(prompts)
    with running_engine(engine__chunk_tokens=chunk_tokens, engine__max_running_sequences=2) as driver:
        for i in range(0, len(prompts), 2):
            assert tokens_of(driver.ask_all(prompts[i : i + 2])) == expected[i : i + 2]


def test_the_same_request_gives_the_same_tokens_in_a_small_and_in_a_huge_pool() -> None:
    """The huge one has more than 2^31 elements: the rows of the last layers lie behind them, whatever the page."""
    prompts = draw_prompts(seed=12, count=8, most_vision_tokens=100)
    with running_engine(kv__dtype="fp8", num_pages=24) as small:
        expected = [small.ask(parts).tokens for parts in prompts]
    huge_bytes = 3 << 30
    layout = page_layout(settings_with(kv__dtype="fp8"))
    assert layout.pages_in(huge_bytes) * layout.payload_bytes_per_token * layout.page_tokens > 2**31
    with running_engine(kv__dtype="fp8", kv__memory_bytes=huge_bytes) as huge:
        assert [huge.ask(parts).tokens for parts in prompts] == expected


@pytest.mark.parametrize(
    ("kv_dtype", "host_bytes", "overlap"),
    [("fp32", 0, True), ("fp32", 0, False), ("fp32", 8 << 20, True), ("fp32", 8 << 20, False), ("fp8", 8 << 20, True)],
)
def test_a_preempted_request_goes_on_where_it_was(host_bytes: int, overlap: bool, kv_dtype: str) -> None:
    prompts = draw_prompts(seed=13, count=14, most_vision_tokens=48)
    options: dict[str, Any] = {"ignore_eos": True, "logprobs": 2}
    with running_engine(kv__dtype=kv_dtype) as roomy:
        expected = roomy.ask_all(prompts, 40, **options)
    with running_engine(num_pages=16, kv__dtype=kv_dtype, kv__host_bytes=host_bytes, engine__overlap=overlap) as tight:
        replies = tight.ask_all(prompts, 40, **options)
        for reply, other in zip(replies, expected, strict=True):
            check_same_answer(reply, other, tie=1e-4 if kv_dtype == "fp32" else 0.03)
        counters = tight.counters()
        assert counters["preemptions"] > 0
        assert (counters["swapped_in_pages"] > 0) == (host_bytes > 0)
        assert counters["generated_tokens"] == 40 * len(prompts)


def check_same_answer(reply: Reply, expected: Reply, tie: float) -> None:
    """Equal tokens, up to one where the two most likely ones are as good as each other (test_logit_bounds says how)."""
    assert len(reply.tokens) == len(expected.tokens)
    for ours, theirs in zip(reply.logprobs, expected.logprobs, strict=True):
        if ours.token_id != theirs.token_id:
            (_, first), (_, second) = theirs.top
            assert first - second <= tie
            return


# -- ends ------------------------------------------------------------------------------------------------------------


def phase_of(driver: Driver, reply: Reply) -> Phase | None:
    """A look at the owner's state from outside: racy, so it only says when to act."""
    sequences = driver.engine._owner._answers.sequences_of(reply.request_id)
    return sequences[0].phase if sequences else None


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PARKED, Phase.MEDIA, Phase.PREFILL, Phase.DECODE])
def test_a_request_that_is_cancelled_in_any_phase_ends_once_and_costs_its_mates_no_token(phase: Phase) -> None:
    sample = draw_sample(random.Random(9), LAYOUT_BY_NAME["pages-4"])
    pictures = [encode_png(picture) for picture in sample.pictures]
    mate_parts = ("Hello!",)
    (expected,) = alone([mate_parts], 100, ignore_eos=True)
    slots = 1 if phase is Phase.WAITING else 8
    with running_engine(engine__max_running_sequences=slots, engine__chunk_tokens=16, media__workers=1) as driver:
        mate = driver.submit(mate_parts, 100, ignore_eos=True)
        leader = driver.submit([*pictures, SEEN], 40) if phase is Phase.PARKED else None
        while leader is not None and phase_of(driver, leader) is not Phase.PREFILL:
            assert not leader.ends
        reply = driver.submit([*pictures, "What is this?"], 60, ignore_eos=True)
        end_s = time.monotonic() + 30
        while (now := phase_of(driver, reply)) is not phase:
            assert not reply.ends, f"it ended without being seen in {phase}"
            assert time.monotonic() < end_s, now
        driver.engine.cancel(reply.request_id)
        driver.engine.cancel(reply.request_id)
        reply.wait()
        assert reply.reason == "cancelled"
        assert mate.wait().tokens == expected
        if leader is not None:
            assert leader.wait().error is None
        driver.engine.cancel(reply.request_id)
        driver.settle()
        assert len(reply.ends) == 1
        assert driver.ask([*pictures, "What is this?"], 8).reason in ("stop", "length")


def test_a_deadline_ends_a_request_with_its_reason_wherever_it_is() -> None:
    with running_engine(engine__max_running_sequences=1) as driver:
        running = driver.submit(["Hello!"], 4000, ignore_eos=True, deadline_s=0.5)
        queued = driver.submit(["Hello!"], 10, deadline_s=0.2)
        patient = driver.submit(["Hello!"], 10, deadline_s=60.0)
        assert queued.wait().reason == "deadline"
        assert queued.tokens == []
        assert running.wait().reason == "deadline"
        assert 0 < len(running.tokens) < 4000
        assert patient.wait().reason in ("stop", "length")


def test_a_prompt_that_can_never_fit_is_refused_with_the_arithmetic_and_encodes_nothing() -> None:
    pictures = small_pictures(10, 4)
    with running_engine(num_pages=4, engine__max_context_tokens=8192, engine__feature_cache_bytes=40_000) as driver:
        with pytest.raises(BadRequest, match="64"):
            driver.prompt([*pictures, *pictures, SEEN])
        fits = driver.ask([pictures[0], SEEN], 4)
        assert fits.error is None
        refused = driver.ask([plain_picture((1, 2, 3), 192), SEEN])
        assert isinstance(refused.error, BadRequest)
        assert "encoder output" in refused.error.reason
        assert driver.counters()["encoded_items"] == 1
        assert driver.ask([pictures[1], SEEN], 4).error is None


# -- what fails alone ------------------------------------------------------------------------------------------------


def test_an_encoder_that_returns_another_number_of_rows_than_the_placeholders_fails_that_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It shares a step, and the encoder's batch, with the others."""
    odd = encode_png(draw_sample(random.Random(14), LAYOUT_BY_NAME["scene-128x160"]).pictures[0])
    others: list[Parts] = [(picture, SEEN) for picture in small_pictures(14, 4)]
    expected = alone(others)
    finish = VisionTower.finish

    def finish_short(self: VisionTower, state: VisionState) -> Features:
        features = finish(self, state)
        if features.num_tokens == 20:
            return Features(features.main[:-1], tuple(level[:-1] for level in features.deepstack))
        return features

    monkeypatch.setattr(VisionTower, "finish", finish_short)
    with running_engine() as driver:
        replies = [driver.submit(parts) for parts in [*others[:2], (odd, SEEN), (odd, "What is it?"), *others[2:]]]
        for reply in replies:
            reply.wait()
        assert tokens_of([*replies[:2], *replies[4:]]) == expected
        for failed in replies[2:4]:
            assert isinstance(failed.error, PrismError)
            assert "19 rows for a medium of 20 tokens" in failed.error.reason
        monkeypatch.setattr(VisionTower, "finish", finish)
        again = driver.ask([odd, SEEN])
        assert again.error is None
        assert again.usage.cached_media_tokens == 0  # nothing was published of what had no features
        assert [again.tokens] == alone([(odd, SEEN)])


def test_a_failed_preparation_fails_those_that_asked_for_it_and_is_not_cached() -> None:
    whole = encode_jpeg(draw_sample(random.Random(15), LAYOUT_BY_NAME["scene-192"]).pictures[0])
    half = whole[: len(whole) // 2]
    good: Parts = (*small_pictures(15, 1), SEEN)
    with running_engine() as driver:
        broken = [driver.submit([half, question]) for question in (SEEN, "What is shown?", SEEN)]
        beside = driver.submit(good)
        for reply in broken:
            assert isinstance(reply.wait().error, BadRequest)
        assert tokens_of([beside.wait()]) == alone([good])
        assert isinstance(driver.ask([half, SEEN]).error, BadRequest)  # asked again, prepared again
        assert driver.ask([whole, SEEN]).error is None
        assert driver.engine.media.stats().cache.in_flight_now == 0


def test_one_broken_picture_among_good_ones_fails_its_request_and_leaves_the_good_ones_usable() -> None:
    whole = encode_jpeg(draw_sample(random.Random(16), LAYOUT_BY_NAME["scene-192"]).pictures[0])
    a, b = small_pictures(16, 2)
    with running_engine() as driver:
        mixed = driver.ask([a, whole[: len(whole) // 2], b, SEEN])
        assert isinstance(mixed.error, BadRequest)
        parts = (a, b, SEEN)
        assert [driver.ask(parts).tokens] == alone([parts])


# -- what is left ----------------------------------------------------------------------------------------------------


def test_nothing_grows_with_the_number_of_requests_served() -> None:
    """Hundreds of requests that end in every way; `running_engine` also checks that pages and queues are empty."""
    prompts = draw_prompts(seed=17, count=30, most_vision_tokens=48)
    rng = random.Random(17)
    with running_engine(
        num_pages=60, kv__host_bytes=4 << 20, engine__feature_cache_bytes=200_000, media__cache_bytes=400_000
    ) as driver:
        sizes = []
        for _ in range(3):
            replies = []
            for _ in range(100):
                parts = rng.choice(prompts)
                replies.append(driver.submit(parts, rng.randint(1, 12), n=rng.choice([1, 1, 1, 2]), stop=("e",)))
                if rng.random() < 0.2:
                    driver.engine.cancel(rng.choice(replies).request_id)
            ends = [reply.wait().ends for reply in replies]
            assert all(len(end) == 1 for end in ends)
            driver.settle()
            sizes.append(held_by(driver))
        stats = driver.engine.stats()
        assert (stats.running_now, stats.waiting_now) == (0, 0)
        assert stats.free_pages_now + stats.evictable_pages_now == stats.total_pages
        assert len(driver.engine._owner._answers) == 0
        assert sizes[0] == sizes[1] == sizes[2]


def held_by(driver: Driver) -> dict[str, int]:
    """Sizes of everything that could keep something of a request."""
    parts = driver.engine._parts
    scheduler, runner = parts.scheduler, parts.executor
    gc.collect()
    return {
        "answers": len(driver.engine._owner._answers),
        "launched": scheduler.num_launched,
        "staged": len(runner._staged) + scheduler.desk.num_staged + scheduler.desk.num_pending,
        "encoding": len(runner._encoding),
        "features without bookkeeping": sum(not scheduler.features.holds(key) for key in runner._features),
        "led keys": len(scheduler.in_flight._leaders),
        "counters": len(scheduler.counters),
    }


def test_the_caches_are_forgotten_on_request() -> None:
    parts = (*small_pictures(18, 2), SEEN)
    with running_engine() as driver:
        first = driver.ask(parts)
        driver.engine.reset_cache()
        second = driver.ask(parts)
        assert (second.usage.cached_tokens, second.usage.encoded_items) == (0, 2)
        assert second.tokens == first.tokens
        driver.engine.reset_cache()
        driver.ask(["Hello!"], 1)
        assert driver.engine.stats().feature_bytes_now == 0


# -- the end of the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["launch", "step"])
def test_what_the_device_raises_ends_everyone_with_an_engine_fault(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine() as driver:
        runner = driver.engine._parts.executor
        running = [driver.submit(["Hello!"], 4000, ignore_eos=True) for _ in range(3)]
        for reply in running:
            reply.wait_for_tokens(2)

        def fail(plan: StepPlan) -> StepHandle:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(runner, "launch" if where == "launch" else "execute", fail)
        for reply in running:
            assert isinstance(reply.wait().error, EngineFault)
            assert "the device is gone" in reply.error.reason
            assert len(reply.ends) == 1
        assert driver.engine.fault is not None
        assert "the device is gone" in driver.engine.fault.reason
        with pytest.raises(EngineFault, match="the device is gone"):
            driver.submit(["Hello!"])


def test_a_stopped_engine_ends_its_requests_and_has_no_fault() -> None:
    engine = Engine.build(settings_with())
    reply = Driver(engine).submit(["Hello!"], 4000, ignore_eos=True).wait_for_tokens(1)
    engine.stop()
    assert isinstance(reply.wait().error, EngineFault)
    assert len(reply.ends) == 1
    assert engine.fault is None
