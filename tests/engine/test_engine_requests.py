"""What requests get from a whole engine with the demo model, and what they are spared."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_support import Parts, Reply, alone, page_layout, running_engine, settings_with, tokens_of
from reference_answers import draw_prompts, small_pictures

from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample, encode_png

SEEN = "Describe what you see."
PICTURE_TOKENS = 9
"""Of a picture of 96 x 96 pixels."""


def pictures_of(question: str, *answers: str) -> list[bytes]:
    """Pictures of one size to which a question has these answers."""
    rng, found = random.Random(question), dict[str, bytes]()
    while not found.keys() >= set(answers):
        sample = draw_sample(rng, LAYOUT_BY_NAME["scene-96"])
        for turn in sample.turns:
            if turn.question == question:
                found.setdefault(turn.answer, encode_png(sample.pictures[0]))
    return [found[answer] for answer in answers]


def groups_of_pictures(seed: int, groups: int, each: int) -> list[list[bytes]]:
    pictures = small_pictures(seed, groups * each)
    return [pictures[i : i + each] for i in range(0, len(pictures), each)]


# -- what is reused --------------------------------------------------------------------------------------------------


def test_two_items_with_equal_placeholder_tokens_never_share_kv() -> None:
    """A, B, A with a red and a blue picture of one size: the prompts' ids are equal, the answers are not."""
    question = "What color is the circle?"
    red, blue = pictures_of(question, "red", "blue")
    with running_engine() as driver:
        first, other, again = (driver.ask([picture, question]) for picture in (red, blue, red))
        assert (first.text, other.text, again.text) == ("red", "blue", "red")
        assert first.prompt.token_ids.tolist() == other.prompt.token_ids.tolist()
        assert other.prompt.page_keys != first.prompt.page_keys
        assert other.usage.cached_media_tokens == 0
        assert other.usage.prefilled_media_tokens == PICTURE_TOKENS
        assert again.usage.cached_media_tokens == PICTURE_TOKENS
        assert (again.usage.prefilled_media_tokens, again.usage.encoded_items, again.usage.decoded_items) == (0, 0, 0)


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
    with running_engine(kv__prefix_cache=False) as plain:
        expected = plain.ask(parts, logprobs=5)
    inside = 0
    with running_engine(num_pages=20, engine__chunk_tokens=chunk_tokens) as driver:
        driver.ask(parts)
        for count in range(1, 9):
            driver.ask([f"{count}" + " 1" * (16 * count)], 2)
            reply = driver.ask(parts, logprobs=5)
            assert reply.tokens == expected.tokens
            for one, other in zip(reply.logprobs, expected.logprobs, strict=True):
                assert dict(one.top) == pytest.approx(dict(other.top), abs=1e-4)
            inside += any(span.start < reply.usage.cached_tokens < span.end for span in reply.prompt.spans)
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
