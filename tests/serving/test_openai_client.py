"""OpenAI's own Python client against a real server."""

from __future__ import annotations

import random
from collections.abc import Iterator

import openai
import pytest
from serving_support import ServerProcess, data_url, encoded, noise

from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.api}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask(text: str, *pictures: bytes) -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def test_models_are_listed_and_found_by_name(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_chat_about_a_picture_is_answered_rightly(client: openai.OpenAI, model: str) -> None:
    sample = draw_sample(random.Random(5), LAYOUT_BY_NAME["scene-192"])
    picture = encoded(sample.pictures[0])
    right = 0
    for turn in sample.turns:
        answer = client.chat.completions.create(model=model, messages=ask(turn.question, picture), temperature=0)
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.role == "assistant"
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        right += choice.message.content == turn.answer
    assert right >= len(sample.turns) * 0.7


def test_a_stream_gives_the_same_text_and_its_usage_last(client: openai.OpenAI, model: str) -> None:
    request = {"model": model, "messages": ask("Describe the picture.", noise(1)), "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**request)
    *chunks, last = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert last.choices == []
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens_details.cached_tokens >= 9
    assert last.model_extra["prism"]["decoded_items"] == 0


def test_a_stream_without_include_usage_has_no_usage(client: openai.OpenAI, model: str) -> None:
    chunks = list(client.chat.completions.create(model=model, messages=ask("Hello"), stream=True, max_tokens=3))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_n_answers_differ_and_a_seed_repeats_them(client: openai.OpenAI, model: str) -> None:
    def sampled(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=model, messages=ask("Hello"), n=3, seed=seed, temperature=2.0, max_tokens=12
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    sampled(7)  # from now on both find the same prefix and draw in the same batches: equal to the last bit
    first = sampled(7)
    assert first == sampled(7)
    assert len(set(first)) > 1


def test_logprobs_of_the_chosen_token_and_of_the_alternatives(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ask("Hello"), logprobs=True, top_logprobs=3, temperature=0, max_tokens=5
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for item in content:
        assert item.logprob <= 0
        assert len(item.top_logprobs) == 3
        assert item.top_logprobs[0].logprob == pytest.approx(item.logprob)  # greedy takes the likeliest
        logprobs = [alternative.logprob for alternative in item.top_logprobs]
        assert logprobs == sorted(logprobs, reverse=True)


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI, model: str) -> None:
    request = {"model": model, "messages": ask("Describe the picture.", noise(1)), "temperature": 0, "max_tokens": 24}
    text = client.chat.completions.create(**request).choices[0].message.content
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    choice = client.chat.completions.create(**request, stop=[stop, "never said"]).choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == stop


def test_max_tokens_ends_the_answer_with_length(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=ask("Hello"), max_completion_tokens=2, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 2


def test_completions_continue_a_text_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    request = {"model": model, "prompt": "one two three", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**request, logprobs=2)
    assert whole.choices[0].text
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    streamed = client.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text


def test_errors_are_the_clients_typed_exceptions(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ask("Hello"), top_p=7)
    assert caught.value.param == "top_p"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ask("What is it?", b"no picture"), stream=True)
    assert caught.value.param == "messages[0].content[0].image_url.url"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="another", messages=ask("Hello"))
    assert missing.value.code == "model_not_found"


def test_a_prompt_beyond_the_context_is_a_400_with_both_numbers(
    client: openai.OpenAI, model: str, server: ServerProcess
) -> None:
    info = server.capacity()
    context = min(info["max_context_tokens"], info["total_pages"] * info["page_tokens"])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ask("word " * context), max_tokens=1)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=ask("Hello"), max_tokens=context)
    assert caught.value.param == "max_tokens"
    assert str(context) in caught.value.message
