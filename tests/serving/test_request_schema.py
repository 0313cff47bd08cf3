"""What a request may say, field by field, and what it is told when it says something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prism_server.errors import BadRequest
from prism_server.serving.schema import ChatRequest, CompletionRequest, GenerateBody, parse_body

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse_body(json.dumps({"messages": MESSAGES} | fields).encode(), ChatRequest).fields


def refusal(kind: type, body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse_body(body, kind)
    assert caught.value.status == 400
    assert caught.value.reason
    return caught.value


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"messages": NaN}', b'"text"', b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": "\\ud800"}'],
)
def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    assert refusal(ChatRequest, body).code == "invalid_json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", "hot"),
        ("top_p", [1]),
        ("n", "1"),
        ("seed", 1.5),
        ("stop", 3),
        ("stream", "yes"),
        ("logprobs", 3),
        ("ignore_eos", 1),
        ("cache_salt", 5),
        ("messages", "hi"),
        ("stream_options", "usage"),
    ],
)
def test_a_known_field_of_a_wrong_type_is_a_400_that_names_it(field: str, value: Any) -> None:
    error = refusal(ChatRequest, json.dumps({"messages": MESSAGES, field: value}).encode())
    assert error.param == field
    assert field in error.reason


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": MESSAGES, "stop": ["a", 5]}, "stop[1]"),
        ({"messages": MESSAGES, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({}, "messages"),
    ],
)
def test_a_400_names_the_place_inside_a_field_and_a_field_that_is_missing(body: dict[str, Any], param: str) -> None:
    assert refusal(ChatRequest, json.dumps(body).encode()).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"min_tokens": 100}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
    ],
)
def test_a_value_out_of_its_range_is_a_400_that_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields).sampling(50, 1.0)
    assert caught.value.param == param


def test_unknown_fields_are_ignored_and_named() -> None:
    body = json.dumps({"messages": MESSAGES, "user": "me", "metadata": {}, "temperature": 0}).encode()
    parsed = parse_body(body, ChatRequest)
    assert parsed.unknown == ("user", "metadata")
    assert parsed.fields.temperature == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 100}),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("echo", True),
        ("best_of", 3),
        ("guided_json", {}),
    ],
)
def test_a_field_whose_loss_would_change_the_answer_is_refused(field: str, value: Any) -> None:
    error = refusal(ChatRequest, json.dumps({"messages": MESSAGES, field: value}).encode())
    assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tools", None),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("logit_bias", {}),
        ("modalities", ["text"]),
        ("echo", False),
        ("best_of", 1),
    ],
)
def test_the_same_field_is_harmless_where_it_asks_for_nothing(field: str, value: Any) -> None:
    body = json.dumps({"messages": MESSAGES, field: value}).encode()
    assert parse_body(body, ChatRequest).unknown == ()


def test_null_means_absent() -> None:
    params = chat(temperature=None, top_p=None, n=None, stop=None, seed=None, logprobs=None).sampling(7, 1.0)
    assert params == chat().sampling(7, 1.0)
    assert (params.temperature, params.n, params.logprobs, params.max_tokens) == (1.0, 1, None, 7)


def test_stop_is_a_string_or_a_list() -> None:
    assert chat(stop="a").sampling(5, 0).stop == ("a",)
    assert chat(stop=["a", "b"]).sampling(5, 0).stop == ("a", "b")
    assert chat(stop=[]).sampling(5, 0).stop == ()


def test_max_completion_tokens_is_the_newer_name_and_wins() -> None:
    assert chat(max_tokens=5).token_limit() == 5
    assert chat(max_tokens=5, max_completion_tokens=9).token_limit() == 9
    assert chat().token_limit() is None


def test_logprobs_of_chats_and_completions() -> None:
    assert chat(logprobs=True).alternatives() == 0
    assert chat(logprobs=True, top_logprobs=4).alternatives() == 4
    assert chat(logprobs=False, top_logprobs=0).alternatives() is None
    assert parse_body(b'{"prompt": "x", "logprobs": 3}', CompletionRequest).fields.alternatives() == 3
    with pytest.raises(BadRequest) as caught:
        parse_body(b'{"prompt": "x", "logprobs": 300}', CompletionRequest).fields.alternatives()
    assert caught.value.param == "logprobs"


def test_a_completion_takes_one_prompt_in_any_of_its_spellings() -> None:
    def prompt(value: Any) -> Any:
        return parse_body(json.dumps({"prompt": value}).encode(), CompletionRequest).fields.one_prompt()

    assert prompt("hi") == prompt(["hi"]) == "hi"
    assert prompt([1, 2, 3]) == [1, 2, 3]
    for several in (["a", "b"], [1, "a"]):
        with pytest.raises(BadRequest) as caught:
            prompt(several)
        assert caught.value.param == "prompt"


def test_the_native_endpoint_takes_messages_or_a_prompt_but_not_both() -> None:
    assert parse_body(b'{"prompt": "x"}', GenerateBody).fields.prompt == "x"
    for body in (b"{}", b'{"prompt": "x", "messages": []}'):
        assert refusal(GenerateBody, body).param == "messages"
