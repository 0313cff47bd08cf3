"""What the router reads of a body: sizes, links, texts, and that nothing a client sends can upset it."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from prism_server.identity import KEY_VERSION, content_id, framed_digest, link_digest
from prism_server.router.media_size import USUAL, MediaSizer
from prism_server.router.pods import KeyScheme
from prism_server.router.request_keys import RequestKeys, read_request

SCHEME = KeyScheme(KEY_VERSION, framed_digest("namespace", ()), "layout")
LINK = "https://example.org/a.png"
LONG_SYSTEM = "You know all about contracts. " * 60


def picture(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(out, "PNG")
    return out.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def read(body: Any, path: str = "/v1/chat/completions", **options: Any) -> RequestKeys:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_request(path, raw, (SCHEME,), MediaSizer(), **options)


def chat(*contents: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


def image(source: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": source}}


def test_picture_tokens_come_from_the_header() -> None:
    keys = read(chat([image(url(picture(448, 448))), image(url(picture(640, 320))), "what?"]))
    assert [(medium.num_tokens, medium.num_patches) for medium in keys.media] == [(196, 784), (200, 800)]
    assert keys.tokens_before == (196, 396)
    assert keys.num_tokens == 396 + 1 + 1


def test_a_medium_without_a_readable_header_has_a_usual_size_and_its_own_name() -> None:
    keys = read(chat([image(url(b"no picture"))]))
    assert keys.media[0].name == content_id("image", b"no picture")
    assert keys.media[0].num_tokens == USUAL.num_tokens


def test_a_link_is_keyed_by_its_text_until_a_pod_reports_the_content() -> None:
    first = read(chat([image(LINK)]))
    assert first.media[0].name == link_digest(LINK)
    content = content_id("image", picture(64, 64))
    known = read(chat([image(LINK)]), content_of={link_digest(LINK): content}.get)
    assert known.media[0].name == content
    sent = read(chat([image(url(picture(64, 64)))]))
    assert known.chains == sent.chains != first.chains


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 5000,
        b"[]",
        b"{}",
        b'{"messages": 3}',
        b'{"messages": []}',
        b'{"messages": [3]}',
        b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
        b'{"messages": [{"role": "user", "content": [{"image_url": "data:;base64,***"}]}]}',
        b'{"messages": [{"role": "user", "content": [{"image_url": "file:///etc/passwd"}]}]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "cache_salt": 3}',
        b'{"prompt": {"a": 1}}',
    ],
)
def test_what_no_pod_would_take_has_no_keys_and_raises_nothing(body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/generate", "/v1/other"):
        keys = read(body, path)
        assert keys.home_key is None
        assert not keys.media


def test_texts_share_keys_as_far_as_they_agree() -> None:
    def keys(system: str, question: str, **options: Any) -> RequestKeys:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return read({"messages": messages, **options})

    one, other = keys(LONG_SYSTEM, "what?"), keys(LONG_SYSTEM, "why?")
    assert one.text_chain == other.text_chain
    assert one.home_key is not None
    assert one.text_tokens[-1] == len(LONG_SYSTEM) // 4
    assert set(keys(LONG_SYSTEM, "what?", cache_salt="a").text_chain).isdisjoint(one.text_chain)
    assert set(keys("Be brief. " + LONG_SYSTEM, "what?").text_chain).isdisjoint(one.text_chain)
    assert keys("Be brief.", "what?").home_key is None


def test_a_longer_conversation_begins_with_the_keys_of_the_shorter() -> None:
    messages = [{"role": "user", "content": "tell me " * 400}, {"role": "assistant", "content": "once " * 500}]
    short = read({"messages": [*messages, {"role": "user", "content": "and then?"}]})
    long = read({"messages": [*messages, {"role": "user", "content": "and then?"}, messages[1], messages[0]]})
    assert long.text_chain[: len(short.text_chain)] == short.text_chain
    assert len(long.text_chain) > len(short.text_chain) > 0


def test_a_bare_prompt_is_keyed_by_its_blocks() -> None:
    one, other = (read({"prompt": LONG_SYSTEM + end}, "/v1/completions") for end in ("yes", "no"))
    assert one.text_chain == other.text_chain
    assert read({"prompt": [LONG_SYSTEM]}, "/v1/completions").text_chain == one.text_chain
    assert read({"prompt": [1, 2, 3]}, "/v1/completions").home_key is None


@pytest.mark.parametrize(
    ("path", "stream", "expected"),
    [
        ("/v1/chat/completions", None, False),
        ("/v1/chat/completions", True, True),
        ("/v1/generate", None, True),
        ("/v1/generate", False, False),
    ],
)
def test_each_endpoint_has_its_own_default_of_streaming(path: str, stream: bool | None, expected: bool) -> None:
    assert read(chat("hi") | {"stream": stream}, path).is_stream is expected


def test_the_limit_of_the_answer_is_read_where_it_makes_sense() -> None:
    assert read(chat("hi") | {"max_tokens": 7}).answer_tokens == 7
    assert read(chat("hi") | {"max_tokens": 7, "max_completion_tokens": 9}).answer_tokens == 9
    assert read(chat("hi") | {"max_tokens": "many"}).answer_tokens is None
