"""The stream and the whole answer are the same text; a native stream says what it did."""

from __future__ import annotations

from typing import Any

import pytest
from serving_support import ServerProcess, chat_body, image_part, noise, sse_events


def streamed_text(server: ServerProcess, body: dict[str, Any]) -> tuple[str, list[str]]:
    """The joined stream and its pieces."""
    url = f"{server.api}/v1/chat/completions"
    with server.http.stream("POST", url, json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert len(response.headers.get_list("x-request-id")) == 1
        *chunks, (_, done) = sse_events(response)
    assert done == "[DONE]"
    pieces = [choice["delta"].get("content") or "" for _, chunk in chunks for choice in chunk["choices"]]
    return "".join(pieces), pieces


@pytest.mark.parametrize("seed", range(8))
def test_join_of_the_stream_is_the_non_streamed_text_for_multi_byte_characters(
    server: ServerProcess, seed: int
) -> None:
    """At this temperature the model says anything: bytes of half a character, rare scripts, broken ones."""
    body = chat_body("Hello", temperature=8.0, seed=seed, max_tokens=80, ignore_eos=True)
    # From now on the prompt is found, and its rest computed alike: equal to the last bit.
    assert server.post("/v1/chat/completions", body | {"max_tokens": 1}).status_code == 200
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert any(ord(character) > 127 for character in whole)
    assert streamed_text(server, body)[0] == whole


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_join_of_the_stream_is_the_non_streamed_text_with_stop_strings_across_chunk_borders(
    server: ServerProcess, length: int
) -> None:
    body = chat_body("Describe the picture.", image_part(noise(3)), max_tokens=40, ignore_eos=True)
    text, pieces = streamed_text(server, body)
    border = len("".join(pieces[: len(pieces) // 2]))
    stop = text[max(0, border - length // 2) : border + length - length // 2]
    stopped = body | {"stop": stop}
    whole = server.post("/v1/chat/completions", stopped).json()["choices"][0]
    assert whole["message"]["content"] == text[: text.index(stop)]
    assert whole["stop_reason"] == stop
    assert streamed_text(server, stopped)[0] == whole["message"]["content"]


def test_a_native_stream_is_accepted_tokens_done(server: ServerProcess) -> None:
    body = chat_body("What is it?", image_part(noise(4)), max_tokens=5, ignore_eos=True, logprobs=1)
    with server.http.stream("POST", f"{server.api}/v1/generate", json=body) as response:
        events = list(sse_events(response))
    names = [name for name, _ in events]
    assert names == ["accepted", *["token"] * (len(events) - 2), "done"]
    tokens = [data for name, data in events if name == "token"]
    done = events[-1][1]
    assert sum(len(data["token_ids"]) for data in tokens) == 5
    assert sum(len(data["logprobs"]) for data in tokens) == 5
    assert done["samples"] == [{"sample": 0, "finish_reason": "length", "stop_reason": None}]
    assert done["usage"]["completion_tokens"] == 5
    assert done["usage"]["decoded_items"] == done["usage"]["encoded_items"] == 1
    assert done["usage"]["prefilled_media_tokens"] == 9
    timings = done["prism"]["timings"]
    assert 0 < timings["encode_ms"] <= timings["prefill_ms"] < timings["first_token_ms"] < timings["total_ms"]
    whole = server.post("/v1/generate", body | {"stream": False}).json()
    assert whole["samples"][0]["text"] == "".join(data["text"] for data in tokens)
    assert whole["usage"]["decoded_items"] == whole["usage"]["encoded_items"] == 0
    assert whole["usage"]["prefilled_media_tokens"] == 0
    assert whole["prism"]["timings"]["encode_ms"] == 0


def test_a_native_request_is_greedy_by_default(server: ServerProcess) -> None:
    body = {"prompt": "one two three", "max_tokens": 8, "stream": False}
    first, second = (server.post("/v1/generate", body).json()["samples"] for _ in range(2))
    assert first == second
