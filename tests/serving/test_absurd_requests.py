"""Absurd values in every field of every endpoint: an answer or a 4xx that names the field, and the engine lives on.

Values are JSON as it is sent, since Python's own writer would not spell all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from serving_support import ServerProcess, data_url, image_part, noise, serving

from prism_server.serving.schema import ChatRequest, CompletionRequest, GenerateBody, GenerationFields

KINDS: dict[str, type[GenerationFields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/generate": GenerateBody,
}
OTHER_FIELDS = ("user", "logit_bias")
PLACES = [(path, field) for path, kind in KINDS.items() for field in (*kind.__struct_fields__, *OTHER_FIELDS)]
HUGE, LONG = "1" + "0" * 400, json.dumps("ab" * 100_000)
INTEGERS = (
    "0",
    "-1",
    "2147483648",
    f"{2**53 + 1}",
    f"{2**63}",
    f"{-(2**63)}",
    f"{2**64}",
    HUGE,
    f"-{HUGE}",
    "9" * 4300,
)
NUMBERS = (*INTEGERS, "9" * 5000, "1.5", "1e30", "-1e308", "5e-324", "-0.0", "1e400", "NaN", "-Infinity")
OTHERS = ("null", "true", '""', LONG, "[]", "{}", f"[{HUGE}]", "[-1]", "[null]", f"[{LONG}]")
LONG_LISTS = (json.dumps(list(range(20_000))), json.dumps(["ab"] * 20_000), "[" * 100_000)
ABSURD = (*NUMBERS, *OTHERS, *LONG_LISTS)

MESSAGES = json.dumps([{"role": "user", "content": "Hello!"}])
USUAL = {"max_tokens": "2", "temperature": "1", "stream": "false"}
PICTURE = json.dumps(data_url(noise(1, 32, 32)))
CONTEXT_TOKENS = 96


@pytest.fixture(scope="module")
def lively() -> Iterator[ServerProcess]:
    """Its context is so short that an answer without a limit ends soon."""
    with serving(**{"engine.max_context_tokens": f"{CONTEXT_TOKENS}"}) as running:
        yield running


@pytest.mark.parametrize(("path", "field"), PLACES)
def test_no_value_of_any_field_ends_the_engine(lively: ServerProcess, path: str, field: str) -> None:
    for value in ABSURD:
        fields = {**greeting(path), **USUAL, field: value}
        if field == "top_logprobs":
            fields["logprobs"] = "true"
        if field in ("min_p", "top_p", "top_k"):
            fields |= {"seed": "-1", "n": "2"}
        if field == "messages":
            fields.pop("prompt", None)
        response = lively.http.post(lively.api + path, content=body_of(fields))
        check_answer(lively, response, field, value)
    check_engine(lively)


@pytest.mark.parametrize("option", ["min_pixels", "max_pixels", "detail", "url"])
def test_no_option_of_a_picture_ends_the_engine(lively: ServerProcess, option: str) -> None:
    for value in ABSURD:
        part = f'{{"type": "image_url", "image_url": {{"url": {PICTURE}, "{option}": {value}}}}}'  # the last one counts
        check_answer(lively, ask_about(lively, part), option, value)
    check_engine(lively)


@pytest.mark.parametrize("option", ["fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "sampling"])
def test_no_option_of_a_clip_ends_the_engine(lively: ServerProcess, option: str) -> None:
    for value in ABSURD:
        options = {"fps": "2", option: value}
        part = written({"type": '"video"', "video": f"[{PICTURE}, {PICTURE}]", **options})
        check_answer(lively, ask_about(lively, part), option, value)
    check_engine(lively)


@pytest.mark.parametrize(
    "ids", [f"[{HUGE}]", f"[-{HUGE}]", f"[{'9' * 4300}, 1]", "[2147483648]", f"[{2**64}]", "[1.5]"]
)
def test_no_token_id_of_a_prompt_ends_the_engine(lively: ServerProcess, ids: str) -> None:
    response = lively.http.post(f"{lively.api}/v1/completions", content=body_of({**USUAL, "prompt": ids}))
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prompt")
    check_engine(lively)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", HUGE),
        ("top_k", "2147483648"),
        ("max_tokens", HUGE),
        ("max_tokens", "9" * 4300),
        ("min_tokens", HUGE),
        ("n", HUGE),
        ("seed", HUGE),
        ("temperature", HUGE),
        ("stop", LONG),
        ("stop", json.dumps(["x" * 1025])),
        ("stop", json.dumps(["x"] * 17)),
        ("stop_token_ids", json.dumps(list(range(257)))),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", f"[{HUGE}]"),
        ("stop_token_ids", "[1000000]"),
        ("stop_token_ids", f"[{', '.join(['5'] * 300)}]"),
    ],
)
@pytest.mark.parametrize("path", KINDS)
def test_what_is_beyond_a_limit_is_a_400_that_names_the_field(
    lively: ServerProcess, path: str, field: str, value: str
) -> None:
    response = lively.http.post(lively.api + path, content=body_of({**greeting(path), **USUAL, field: value}))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert len(error["message"]) < 500


def test_the_largest_values_that_are_allowed_are_served(lively: ServerProcess) -> None:
    fields = {
        "top_k": 2**31 - 1,
        "temperature": 100,
        "seed": 2**63 - 1,
        "n": 16,
        "logprobs": 20,
        "max_tokens": 8,
        "min_tokens": 8,
        "repetition_penalty": 100,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "stop": [f"{i:x}" * 1024 for i in range(16)],
        "stop_token_ids": list(range(256)),
    }
    answer = lively.post("/v1/completions", {"prompt": "Hello!", **fields})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16 * 8
    check_engine(lively)


@pytest.mark.parametrize("value", ["[]", "{}", "1", '"a"'])
def test_a_body_of_millions_of_values_is_refused_before_it_is_parsed(lively: ServerProcess, value: str) -> None:
    """Nothing else would run meanwhile. Half a million of them, in a field that nobody knows, are read."""
    few, many = (f"[{','.join([value] * count)}]" for count in (500_000, 1_100_000))
    words = {"prompt": '"Hello!"', **USUAL}
    refused = lively.http.post(f"{lively.api}/v1/completions", content=body_of({**words, "metadata": many}))
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
    read = lively.http.post(f"{lively.api}/v1/completions", content=body_of({**words, "metadata": few}))
    assert read.status_code == 200


def test_a_medium_that_cannot_be_copied_for_the_device_is_a_429_that_routers_do_not_take_for_a_fault() -> None:
    prelude = """
from prism_server.engine.runner import Runner
prepare, failures = Runner.prepare, ["no host memory is left"]
def fails_once(self, patches):
    if failures:
        raise RuntimeError(failures.pop())
    return prepare(self, patches)
Runner.prepare = fails_once
"""
    picture = image_part(noise(2))
    with serving(prelude) as server:
        failed = server.chat(picture, "What is shown?", stream=True)
        assert (failed.status_code, failed.json()["error"]["code"]) == (429, "medium_not_copied")
        assert int(failed.headers["retry-after"]) >= 1
        assert server.http.get(f"{server.api}/readyz").status_code == 200
        assert server.chat(picture, "What is shown?").status_code == 200
        assert server.metrics()["prism_refusals_total{medium_not_copied}"] == 1


# -- what they share -------------------------------------------------------------------------------------------------


def greeting(path: str) -> dict[str, str]:
    return {"messages": MESSAGES} if path.endswith("chat/completions") else {"prompt": '"Hello!"'}


def written(fields: dict[str, str]) -> str:
    """A JSON object of values that are JSON already."""
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in fields.items()) + "}"


def body_of(fields: dict[str, str]) -> bytes:
    return written(fields).encode()


def ask_about(server: ServerProcess, part: str) -> httpx.Response:
    messages = f'[{{"role": "user", "content": [{part}, "Hello!"]}}]'
    return server.http.post(f"{server.api}/v1/chat/completions", content=body_of({**USUAL, "messages": messages}))


def check_answer(server: ServerProcess, response: httpx.Response, field: str, value: str) -> None:
    """An answer, or a refusal of reasonable length that says of what; the engine has no fault."""
    said = f"{field} {value[:40]}: {response.status_code} {response.text[:300]}"
    if response.status_code != 200:
        error = response.json()["error"]
        assert 400 <= response.status_code < 429, said
        assert error["param"] or error["code"] == "invalid_json", said
        assert len(response.content) < 10_000, said
    assert server.http.get(f"{server.api}/livez").status_code == 200, said


def check_engine(server: ServerProcess) -> None:
    answer = server.post("/v1/completions", {"prompt": "Hello!", "max_tokens": 2, "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] >= 1
