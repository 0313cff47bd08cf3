"""Events of the engine in the shapes that clients read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from prism_server.demo_model import checkpoint_dir
from prism_server.engine.messages import (
    Accepted,
    Event,
    RequestFinished,
    SampleFinished,
    Timings,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from prism_server.errors import BadRequest, EngineFault, Overloaded, PrismError
from prism_server.prompt.tokenizer import Tokenizer
from prism_server.serving.answers import Collected, Sample
from prism_server.serving.http_errors import NotReady, error_response, refusal_reason
from prism_server.serving.openai_format import AnswerFormat, ChatFormat, CompletionFormat, OpenAIStream
from prism_server.serving.sse import frame

USAGE = Usage(10, 4, cached_tokens=6, cached_media_tokens=5, prefilled_tokens=4, prefilled_media_tokens=1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint_dir())


def events(tokenizer: Tokenizer) -> list[Event]:
    """Two samples: one whose é is completed by its second token, one that stops on a string."""
    a, b = (tokenizer.encode_runs([text])[0][0].item() for text in ("a", "b"))
    return [
        Accepted("r", Usage(10, cached_tokens=6)),
        TokenDelta("r", 0, (a,), "", (TokenLogprob(a, -0.5, ((a, -0.5), (b, -1.5))),)),
        TokenDelta("r", 1, (b,), "b", (TokenLogprob(b, -0.1),)),
        TokenDelta("r", 0, (b,), "é", (TokenLogprob(b, -0.2),)),
        SampleFinished("r", 1, "stop", "END"),
        SampleFinished("r", 0, "length"),
        RequestFinished("r", USAGE, Timings(queue_ms=1.5, total_ms=9.0)),
    ]


def chunks(stream: OpenAIStream, happened: list[Event]) -> list[Any]:
    """What a client reads: the data of each event."""
    raw = b"".join(map(stream.frames, happened)).decode()
    assert raw.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in raw.removesuffix("\n\n").split("\n\n")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def form(kind: type[AnswerFormat], tokenizer: Tokenizer, wants_logprobs: bool = False) -> AnswerFormat:
    return kind("id-1", "demo", tokenizer, wants_logprobs)


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
@pytest.mark.parametrize("include_usage", [False, True])
def test_every_chunk_of_text_has_the_same_fields_in_the_same_order(
    kind: type[AnswerFormat], include_usage: bool, tokenizer: Tokenizer
) -> None:
    """The first is made in full, the later ones around their text."""
    stream = OpenAIStream(form(kind, tokenizer), include_usage)
    texts = ["a", 'quote " and \\', "\n\t\x00", "é漢😀", "</script>", "a"]
    frames = [stream.frames(TokenDelta("r", 0, (1,), text)).split(b"\n\n")[-2] for text in texts]
    decoded = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    first = json.dumps(decoded[0])
    for text, chunk in zip(texts, decoded, strict=True):
        choice = chunk["choices"][0]
        place = choice["delta"] if kind is ChatFormat else choice
        key = "content" if kind is ChatFormat else "text"
        assert place[key] == text
        place[key] = "a"
        assert json.dumps(chunk) == first
    silent = json.loads(stream.frames(TokenDelta("r", 0, (1,), "")).strip().removeprefix(b"data: "))
    place = silent["choices"][0]["delta"] if kind is ChatFormat else silent["choices"][0]
    assert place["content" if kind is ChatFormat else "text"] == "", "a token without text has a chunk, too"


def test_a_frame_is_one_event_whatever_its_text() -> None:
    assert frame({"text": "a\n\ndata: b\r"}, "token") == b'event: token\ndata: {"text":"a\\n\\ndata: b\\r"}\n\n'


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_a_stream_says_what_the_whole_answer_says(kind: type[AnswerFormat], tokenizer: Tokenizer) -> None:
    happened = events(tokenizer)
    collected = Collected([Sample(), Sample()])
    for event in happened:
        collected.take(event)
    whole = form(kind, tokenizer).whole(collected)
    *streamed, last, done = chunks(OpenAIStream(form(kind, tokenizer), True), happened)
    assert done == "[DONE]"
    assert (last["usage"], last["prism"], last["choices"]) == (whole["usage"], whole["prism"], [])
    for choice in whole["choices"]:
        parts = [c for chunk in streamed for c in chunk["choices"] if c["index"] == choice["index"]]
        text = "".join(part["delta"].get("content", "") if kind is ChatFormat else part["text"] for part in parts)
        assert text == (choice["message"]["content"] if kind is ChatFormat else choice["text"])
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert parts[-1]["stop_reason"] == choice["stop_reason"]
    assert all(chunk["usage"] is None for chunk in streamed)


def test_a_chat_stream_opens_each_sample_with_its_role(tokenizer: Tokenizer) -> None:
    streamed = chunks(OpenAIStream(form(ChatFormat, tokenizer), False), events(tokenizer))
    first = {}
    for chunk in streamed[:-1]:
        assert "usage" not in chunk
        first.setdefault(chunk["choices"][0]["index"], chunk["choices"][0]["delta"])
    assert [first[i]["role"] for i in (0, 1)] == ["assistant", "assistant"]


def test_usage_has_openais_names_and_prism_says_what_was_spared(tokenizer: Tokenizer) -> None:
    *_, last, _ = chunks(OpenAIStream(form(ChatFormat, tokenizer), True), events(tokenizer))
    assert last["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    assert last["prism"]["cached_media_tokens"] == 5
    assert last["prism"]["prefilled_text_tokens"] == 3
    assert last["prism"]["timings"]["queue_ms"] == 1.5


def as_sent(body: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(body))


def test_logprobs_have_the_shapes_of_chats_and_completions(tokenizer: Tokenizer) -> None:
    happened = events(tokenizer)
    collected = Collected([Sample(), Sample()])
    for event in happened:
        collected.take(event)
    chat = as_sent(form(ChatFormat, tokenizer, True).whole(collected))["choices"][0]["logprobs"]["content"]
    assert [(item["token"], item["logprob"], item["bytes"]) for item in chat] == [("a", -0.5, [97]), ("b", -0.2, [98])]
    assert [item["token"] for item in chat[0]["top_logprobs"]] == ["a", "b"]
    text = as_sent(form(CompletionFormat, tokenizer, True).whole(collected))["choices"][0]["logprobs"]
    assert text["tokens"] == ["a", "b"]
    assert text["token_logprobs"] == [-0.5, -0.2]
    assert text["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    assert text["text_offset"] == [0, 1]


def test_a_stream_that_fails_ends_in_an_error_event_and_the_final_one(tokenizer: Tokenizer) -> None:
    raw = OpenAIStream(form(ChatFormat, tokenizer), False).failure(EngineFault("the engine broke")).decode()
    error, done = raw.removesuffix("\n\n").split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the engine broke"
    assert done == "data: [DONE]"


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "reason"),
    [
        (BadRequest("no", param="n"), 400, None, "invalid_request_error"),
        (BadRequest("no", status=413, code="body_too_large"), 413, None, "body_too_large"),
        (Overloaded("full", retry_after_s=7), 429, "7", "overloaded_error"),
        (NotReady("loading", "loading"), 503, "1", "loading"),
        (EngineFault("broke"), 503, "1", "engine_error"),
    ],
)
def test_errors_on_the_wire(error: PrismError, status: int, retry_after: str | None, reason: str) -> None:
    response = error_response(error)
    body = json.loads(response.body)["error"]
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert set(body) == {"message", "type", "param", "code"}
    assert body["message"] == error.reason
    assert refusal_reason(error) == reason
