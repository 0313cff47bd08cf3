"""How answers are drawn and where they end, through the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_support import Driver, Parts, Reply, agreement, running_engine
from reference import DEMO_CHECKPOINT
from reference_answers import Reference, draw_prompts, small_pictures
from transformers import AutoTokenizer

CHATTY = "Hello!"
"""The demo model greets back with some twenty tokens."""
EXACT = 1e-4
LEAST_AGREEMENT = 0.9
WILD: dict[str, Any] = {"temperature": 6.0, "top_k": 50, "ignore_eos": True}
"""Hot enough to draw something else each time: the demo model is sure of its answers. Among fifty tokens there are few
boundaries between two of them for a number to be near to (see `agreement`)."""


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with running_engine() as driver:
        yield driver


@pytest.fixture(scope="module")
def natural(driver: Driver) -> Reply:
    """The greedy answer to CHATTY, up to its end token."""
    reply = driver.ask([CHATTY], 60)
    assert reply.reason == "stop"
    assert len(reply.tokens) > 10
    return reply


@pytest.fixture(scope="module")
def prompts() -> list[Parts]:
    return draw_prompts(seed=8, count=12, most_vision_tokens=48)


def end_token(natural: Reply) -> int:
    return natural.tokens[-1]


# -- seeds -----------------------------------------------------------------------------------------------------------


def test_a_seeded_request_repeats_itself_whatever_runs_beside_it(driver: Driver, prompts: list[Parts]) -> None:
    alone = [driver.ask(parts, 16, seed=40 + i, **WILD).tokens for i, parts in enumerate(prompts[:4])]
    mates = [driver.submit(parts, 30, **WILD) for parts in prompts[4:]]
    together = [driver.submit(parts, 16, seed=40 + i, **WILD) for i, parts in enumerate(prompts[:4])]
    assert agreement([reply.wait() for reply in together], alone) >= LEAST_AGREEMENT
    assert all(len(mate.wait().tokens) == 30 for mate in mates)
    assert driver.ask(prompts[0], 16, seed=41, **WILD).tokens != alone[0]


def test_requests_without_a_seed_differ(driver: Driver) -> None:
    assert len({tuple(driver.ask([CHATTY], 16, **WILD).tokens) for _ in range(4)}) > 1


def test_a_seeded_request_is_the_same_in_the_plain_loop_in_chunks_and_without_a_cache(
    driver: Driver, prompts: list[Parts]
) -> None:
    expected = [driver.ask(parts, 12, seed=5, **WILD).tokens for parts in prompts]
    plain = {"engine__overlap": False, "engine__chunk_tokens": 16, "kv__prefix_cache": False}
    with running_engine(**plain) as other:
        assert agreement(other.ask_all(prompts, 12, seed=5, **WILD), expected) >= LEAST_AGREEMENT


# -- samples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_tokens", [16, 64])
def test_samples_share_the_prompt_which_is_prefilled_once(page_tokens: int) -> None:
    """Each further sample computes one token of it: the last, in a page of its own."""
    with running_engine(kv__page_tokens=page_tokens) as driver:
        for picture in small_pictures(3, 3):
            before = driver.counters()
            reply = driver.ask([picture, "What is shown?"], 8, n=5, seed=2, **WILD)
            prompt_tokens = len(reply.prompt)
            assert reply.usage.prefilled_tokens == prompt_tokens + 4
            assert reply.usage.prefilled_media_tokens == 9
            assert (reply.usage.encoded_items, reply.usage.decoded_items) == (1, 1)
            assert reply.usage.completion_tokens == 5 * 8
            after = driver.counters()
            assert after["prefilled_tokens"] - before.get("prefilled_tokens", 0) == prompt_tokens + 4
            assert after["encoded_items"] - before.get("encoded_items", 0) == 1


def test_samples_differ_repeat_with_their_seed_and_are_equal_when_greedy(driver: Driver) -> None:
    first = driver.ask([CHATTY], 16, n=4, seed=9, **WILD).samples
    assert sorted(first) == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in first.values()}) == 4
    again = driver.ask([CHATTY], 16, n=4, seed=9, **WILD).samples  # the prompt is found now: other batches
    assert agreement([again[sample] for sample in range(4)], [first[sample] for sample in range(4)]) >= LEAST_AGREEMENT
    greedy = driver.ask([CHATTY], 16, n=3)
    assert greedy.samples[0] == greedy.samples[1] == greedy.samples[2]
    assert len(greedy.finishes) == 3


# -- ends ------------------------------------------------------------------------------------------------------------


def test_max_tokens_ends_an_answer_with_its_reason(driver: Driver, natural: Reply) -> None:
    for count in (1, 2, 7):
        reply = driver.ask([CHATTY], count)
        assert reply.tokens == natural.tokens[:count]
        assert (reply.reason, reply.usage.completion_tokens) == ("length", count)


def test_ignore_eos_goes_on_after_the_end_token(driver: Driver, natural: Reply) -> None:
    count = len(natural.tokens) + 5
    reply = driver.ask([CHATTY], count, ignore_eos=True)
    assert reply.tokens[: count - 5] == natural.tokens
    assert (len(reply.tokens), reply.reason) == (count, "length")


def test_an_answer_below_min_tokens_has_no_end_token_and_no_stop_id(driver: Driver, natural: Reply) -> None:
    least = len(natural.tokens) + 6
    reply = driver.ask([CHATTY], least + 20, min_tokens=least)
    assert len(reply.tokens) >= least
    assert end_token(natural) not in reply.tokens[: least - 1]
    stop_id = natural.tokens[2]
    later = driver.ask([CHATTY], 20, min_tokens=8, stop_token_ids=frozenset((stop_id,)))
    assert stop_id not in later.tokens[:7]
    assert len(later.tokens) >= 8
    assert later.tokens[:2] == natural.tokens[:2]


def test_a_stop_id_ends_an_answer_and_is_named(driver: Driver, natural: Reply) -> None:
    stop_id = natural.tokens[4]
    reply = driver.ask([CHATTY], 60, stop_token_ids=frozenset((stop_id,)))
    assert reply.tokens == natural.tokens[: natural.tokens.index(stop_id) + 1]
    assert (reply.finishes[0].reason, reply.finishes[0].stop_reason) == ("stop", stop_id)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stop_string_ends_the_text_before_it_and_nothing_after_it_is_emitted(natural: Reply, overlap: bool) -> None:
    """Every piece of the answer as the stop string: inside a token, across tokens, at the start and at the end."""
    text = natural.text
    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    ends = [len(tokenizer.decode(natural.tokens[:count])) for count in range(1, len(natural.tokens))]
    with running_engine(engine__overlap=overlap) as driver:
        stops = [text[start : start + length] for length in (1, 2, 5, 11) for start in range(0, len(text) - length, 3)]
        replies = [driver.submit([CHATTY], 60, stop=(stop, "not in there")) for stop in stops]
        for stop, reply in zip(stops, replies, strict=True):
            reply.wait()
            assert reply.text == text[: text.index(stop)], stop
            assert (reply.finishes[0].reason, reply.finishes[0].stop_reason) == ("stop", stop)
            completes = text.index(stop) + len(stop)
            count = next(i for i, end in enumerate(ends, 1) if end >= completes)
            assert reply.tokens == natural.tokens[:count], stop
            assert reply.usage.completion_tokens == count
        assert driver.counters()["generated_tokens"] == sum(len(reply.tokens) for reply in replies)


def test_a_stop_string_that_the_last_token_completes_is_why_the_answer_ends(driver: Driver, natural: Reply) -> None:
    """Not `length`: a client that asks for more then would get what comes after the stop string."""
    whole = driver.ask([CHATTY], 8).text
    reply = driver.ask([CHATTY], 8, stop=(whole,))
    assert (reply.text, reply.tokens) == ("", natural.tokens[:8])
    assert (reply.finishes[0].reason, reply.finishes[0].stop_reason) == ("stop", whole)


def test_a_stop_string_that_never_comes_changes_nothing(driver: Driver, natural: Reply) -> None:
    reply = driver.ask([CHATTY], 60, stop=(natural.text + "?", natural.text[-3:] + "!"))
    assert (reply.text, reply.tokens, reply.reason) == (natural.text, natural.tokens, "stop")
    assert reply.finishes[0].stop_reason is None


def test_a_stop_string_below_min_tokens_stays_text(driver: Driver, natural: Reply) -> None:
    stop = natural.text[:3]
    reply = driver.ask([CHATTY], 8, min_tokens=8, stop=(stop,))
    assert reply.text.startswith(stop)
    assert reply.tokens == natural.tokens[:8]


# -- penalties and log-probabilities ---------------------------------------------------------------------------------


def test_a_repetition_penalty_gives_the_references_tokens(driver: Driver, prompts: list[Parts]) -> None:
    """Media placeholders of the prompt count as tokens there and here."""
    reference = Reference(DEMO_CHECKPOINT)
    plain = [reference.greedy(parts, 16, ignore_eos=True) for parts in prompts]
    expected = [reference.greedy(parts, 16, ignore_eos=True, repetition_penalty=1.4) for parts in prompts]
    assert sum(a != b for a, b in zip(plain, expected, strict=True)) > len(prompts) / 2
    replies = driver.ask_all(prompts, 16, ignore_eos=True, repetition_penalty=1.4)
    assert [reply.tokens for reply in replies] == expected


def test_penalties_and_seeds_survive_a_preemption(prompts: list[Parts]) -> None:
    options: dict[str, Any] = {"temperature": 4.0, "repetition_penalty": 1.2, "frequency_penalty": 0.7, "seed": 3}
    with running_engine() as roomy:
        expected = [roomy.ask(parts, 40, ignore_eos=True, **options).tokens for parts in prompts]
    with running_engine(num_pages=16) as tight:
        replies = tight.ask_all(prompts, 40, ignore_eos=True, **options)
        assert tight.counters()["preemptions"] > 0
        assert agreement(replies, expected) >= LEAST_AGREEMENT


def test_logprobs_equal_the_references_and_alternatives_come_most_likely_first(
    driver: Driver, prompts: list[Parts]
) -> None:
    reference = Reference(DEMO_CHECKPOINT)
    replies = driver.ask_all(prompts, 8, logprobs=20, temperature=4.0, seed=1)
    for parts, reply in zip(prompts, replies, strict=True):
        expected = reference.logits(parts, reply.tokens).log_softmax(dim=-1)
        assert [one.token_id for one in reply.logprobs] == reply.tokens
        for one, row in zip(reply.logprobs, expected, strict=True):
            ids, values = zip(*one.top, strict=True)
            assert len(set(ids)) == 20
            assert list(values) == sorted(values, reverse=True)
            torch.testing.assert_close(torch.tensor(values), row[list(ids)], rtol=0, atol=EXACT)
            torch.testing.assert_close(torch.tensor(values), row.topk(20).values, rtol=0, atol=EXACT)
            assert one.logprob == pytest.approx(float(row[one.token_id]), abs=EXACT)


def test_logprobs_of_no_alternatives_are_the_tokens_own(driver: Driver, natural: Reply) -> None:
    reply = driver.ask([CHATTY], 5, logprobs=0)
    assert [one.token_id for one in reply.logprobs] == natural.tokens[:5]
    assert all(one.top == () and one.logprob < 0 for one in reply.logprobs)
    assert natural.logprobs == []
