"""What the server does about a fault of its own code in one medium, and about clients that have to wait."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from serving_support import ServerProcess, chat_body, data_url, eventually, image_part, noise, serving, sse_events

PRELUDE = """
import time
from prism_server.engine import runner
from prism_server.media import kinds
from prism_server.serving import exchange

exchange.COMMENT_EVERY_S = 0.2
prepare, describe, execute = kinds.ImageKind.prepare, kinds.ImageKind.describe, runner.Runner.execute
def describe_but_gif(self, item, key):
    if item.data.startswith(b"GIF"):
        raise ZeroDivisionError("secret of a header")
    return describe(self, item, key)
def prepare_but_bmp(self, item, *rest):
    if item.data.startswith(b"BM"):
        raise ZeroDivisionError("secret of the inside")
    return prepare(self, item, *rest)
def execute_slowly_if_large(self, plan):
    if any(rows.count > 300 for rows in plan.sequences):
        time.sleep(3)
    return execute(self, plan)
kinds.ImageKind.describe, kinds.ImageKind.prepare = describe_but_gif, prepare_but_bmp
runner.Runner.execute = execute_slowly_if_large
"""
LONG = " ".join(map(str, range(400)))


@pytest.fixture(scope="module")
def odd_server() -> Iterator[ServerProcess]:
    with serving(PRELUDE) as server:
        yield server


def poison(kind: str) -> dict[str, Any]:
    out = io.BytesIO()
    Image.new("RGB", (64, 64)).save(out, kind)
    return {"type": "image_url", "image_url": {"url": data_url(out.getvalue(), f"image/{kind}")}}


@pytest.mark.parametrize(("kind", "secret"), [("gif", "secret of a header"), ("bmp", "secret of the inside")])
def test_a_fault_of_our_own_at_one_medium_is_about_that_request_alone(
    odd_server: ServerProcess, kind: str, secret: str
) -> None:
    """Not a 5xx: a router would ask pod after pod, or count it against each."""
    refusals = "prism_refusals_total{media_failed}"
    before = odd_server.metrics().get(refusals, 0)
    answer = odd_server.chat("See:", image_part(noise(1)), poison(kind), stream=True)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "media_failed")
    assert error["param"] == "messages[0].content[2].image_url.url"
    assert "secret" not in answer.text
    assert "ZeroDivision" not in answer.text
    assert odd_server.chat("See:", image_part(noise(1)), max_tokens=2).status_code == 200
    said = f"    ZeroDivisionError: {secret}\n"
    eventually(lambda: said in odd_server.stderr, 10)
    assert odd_server.stderr.count(said) == 1
    digits = error["message"].rpartition(": ")[2]
    assert any(f"medium {digits}" in line for line in odd_server.stderr), "the message leads to the traceback"
    assert odd_server.metrics()[refusals] == before + 1


def stream_text(server: ServerProcess, **headers: str) -> tuple[dict[str, str], str]:
    body = chat_body(LONG, max_tokens=3, ignore_eos=True, stream=True, cache_salt=str(headers))
    with server.http.stream("POST", f"{server.api}/v1/chat/completions", json=body, headers=headers) as answer:
        return dict(answer.headers), "".join(answer.iter_text())


def test_a_stream_that_waits_is_kept_open_by_comments(odd_server: ServerProcess) -> None:
    _, text = stream_text(odd_server)
    assert text.startswith(": waiting\n\n")
    assert text.rstrip().endswith("data: [DONE]")


def test_behind_a_router_the_first_byte_is_the_answers(odd_server: ServerProcess) -> None:
    headers, text = stream_text(odd_server, **{"x-prism-router": "1"})
    assert text.startswith("data: ")
    assert ": waiting" not in text
    assert int(headers["x-prism-prompt-tokens"]) > 300


def test_the_log_says_which_request_it_was_what_it_cost_and_how_it_ended(odd_server: ServerProcess) -> None:
    body = chat_body(image_part(noise(2)), "Which line is mine?", max_tokens=3, ignore_eos=True)
    headers = {"x-request-id": "mine-17"}
    first = odd_server.post("/v1/chat/completions", body, headers=headers).json()
    odd_server.chat("Hello", temperature=-1, stream=True)

    def lines(mark: str) -> list[str]:
        return [line for line in odd_server.stderr if mark in line]

    eventually(lambda: bool(lines("[mine-17] ")), 10)
    [line] = lines("[mine-17] ")
    engine_id = first["id"].removeprefix("chatcmpl-")
    prompt_tokens = first["usage"]["prompt_tokens"]
    assert " INFO " in line
    assert f"POST /v1/chat/completions 200 end=ok engine_id={engine_id} prompt_tokens={prompt_tokens} " in line
    assert "answer_tokens=3 ms=" in line
    eventually(lambda: bool(lines(" 400 end=invalid_request_error ")), 10)
    streamed = odd_server.post("/v1/generate", body | {"stream": True}, headers={"x-request-id": "mine-18"})
    *_, (name, done) = sse_events(streamed)
    assert (name, done["usage"]["cached_tokens"] > 9) == ("done", True)
    eventually(lambda: bool(lines("[mine-18] ")), 10)
    assert f"reused_tokens={done['usage']['cached_tokens']} answer_tokens=3 " in lines("[mine-18] ")[0]
