"""Text from tokens, however they come: whole characters, stop strings, the same text streamed and at once."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

import prism_server
from prism_server.prompt.detokenise import IncrementalDetokeniser, SampleText, StopMatcher
from prism_server.prompt.tokenizer import Tokenizer

DEMO = Path(prism_server.__file__).parent / "demo_model" / "checkpoint"
TOKENIZER = Tokenizer.load(DEMO)
REFERENCE = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))

HARD = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "𠜎", "𪚥", "龘", "é", "e\u0301", "\u200d", "ﷺ", "\ufffd", "\0", "a", "b", " ", "\n"]
TEXTS = st.lists(st.sampled_from(HARD) | st.text(max_size=4), max_size=30).map("".join)
TOKEN_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode_runs([text])[0].tolist()
    return ids


def chunks(ids: list[int], seed: int) -> list[list[int]]:
    """The ids cut at random, empty chunks among them."""
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(ids)) for _ in range(rng.randint(0, len(ids) + 1)))
    return [ids[a:b] for a, b in pairwise([0, *cuts, len(ids)])]


def streamed(ids: list[int], stops: list[str], seed: int) -> tuple[str, str | None]:
    sample = SampleText(TOKENIZER, stops)
    text, matched = "", None
    for chunk in chunks(ids, seed):
        ready, matched = sample.push(chunk)
        text += ready
    return text + sample.flush(), matched


def stopped(text: str, stops: list[str]) -> str:
    """The definition: the text before the stop string that is complete first, of several the longest."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        return text
    end = min(ends)
    return text[: end - max(len(stop) for stop in stops if text[:end].endswith(stop))]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=st.lists(st.text("ab👩\u200d\n", min_size=1, max_size=4), max_size=3), seed=st.integers(0, 99))
@example(text="xaab", stops=["aab"], seed=0)
@example(text="aabaaabaaac", stops=["aabaaac"], seed=0)
@example(text="xabcd", stops=["abcd", "bc"], seed=1)
@example(text="ab", stops=["b", "ab"], seed=2)
def test_the_joined_stream_is_the_whole_text_for_every_prompt(text: str, stops: list[str], seed: int) -> None:
    ids = encode(text)
    whole = TOKENIZER.decode(ids)
    assert streamed(ids, stops, seed)[0] == stopped(whole, stops)


@settings(max_examples=300, deadline=None)
@given(
    ids=TOKEN_IDS, cuts=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=3), seed=st.integers(0, 99)
)
def test_the_joined_stream_is_the_whole_text_for_every_sequence_of_ids(
    ids: list[int], cuts: list[tuple[int, int]], seed: int
) -> None:
    """Also for bytes that are no characters; stop strings are taken from the text itself, so that they match."""
    whole = TOKENIZER.decode(ids)
    stops = [whole[start : start + length] for start, length in cuts if whole[start : start + length]]
    text, matched = streamed(ids, stops, seed)
    assert text == stopped(whole, stops)
    if matched is not None:
        assert whole.startswith(text + matched)


@settings(max_examples=300, deadline=None)
@given(TOKEN_IDS)
def test_text_at_once_equals_the_reference_decoder(ids: list[int]) -> None:
    assert TOKENIZER.decode(ids) == REFERENCE.decode(ids, skip_special_tokens=True)
    assert TOKENIZER.decode(ids, skip_special=False) == REFERENCE.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 and 🏳️‍🌈", "𠜎𪚥龘", "naïve, €5"])
def test_characters_whose_bytes_span_tokens_stream_without_replacement_characters(text: str) -> None:
    ids = encode(text)
    assert len(ids) > len(text) / 2
    detokeniser = IncrementalDetokeniser(TOKENIZER)
    pieces = [detokeniser.push(token_id) for token_id in ids]
    assert "".join(pieces) == text
    assert "" in pieces  # some character did span tokens
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokeniser.flush() == ""


def test_bytes_that_are_no_character_come_out_as_replacement_characters() -> None:
    byte_ids = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size)}
    detokeniser = IncrementalDetokeniser(TOKENIZER)
    assert detokeniser.push(byte_ids[b"\xf0"]) == ""
    assert detokeniser.push(byte_ids[b"a"]) == "\ufffda"
    assert detokeniser.push(byte_ids[b"\xff"]) == "\ufffd"
    assert detokeniser.push(byte_ids[b"\xe2"]) == ""
    assert detokeniser.flush() == "\ufffd"
    assert detokeniser.push(byte_ids[b"b"]) == "b"


def test_special_tokens_are_skipped_and_ordinary_added_ones_are_text() -> None:
    added = TOKENIZER.added_tokens
    ids = [*encode("a"), added["<|im_start|>"], added["<think>"], *encode("b"), TOKENIZER.eos_ids[0], added["</think>"]]
    assert SampleText(TOKENIZER).push(ids)[0] == "a<think>b</think>"
    assert SampleText(TOKENIZER, skip_special=False).push([added["<|im_start|>"]])[0] == "<|im_start|>"
    assert SampleText(TOKENIZER, stops=["<think>"]).push(ids) == ("a", "<think>")


def test_a_padding_id_of_the_embedding_is_no_text(released_tokenizer: Tokenizer) -> None:
    assert SampleText(released_tokenizer).push([released_tokenizer.vocab_size - 1]) == ("", None)


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=3))
def test_exactly_what_may_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for i, character in enumerate(text, 1):
        sent += matcher.push(character)
        if matcher.matched is not None:
            break
        begins = [k for k in range(i + 1) if any(stop.startswith(text[k:i]) for stop in stops)]
        assert sent == text[: min(begins, default=i)]
    assert sent + matcher.flush() == stopped(text, stops)


def test_nothing_follows_a_matched_stop_string() -> None:
    sample = SampleText(TOKENIZER, stops=["STOP"])
    assert sample.push(encode("one STOP two")) == ("one ", "STOP")
    assert sample.push(encode("three")) == ("", "STOP")
    assert sample.flush() == ""


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(["a", ""])
