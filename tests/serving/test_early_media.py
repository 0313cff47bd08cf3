"""Media that leave a body before its JSON is parsed: nothing that a body says may change by that."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_support import ServerProcess, image_part, noise

from prism_server.media.limits import MediaLimits
from prism_server.serving.early_media import LEAST_PAYLOAD_BYTES, EarlyMedia, take_media_out

LIMITS = MediaLimits(max_items=8, max_item_bytes=1 << 20, max_decoded_pixels=1 << 24)
PICTURE = bytes(range(256)) * 8


def url_of(data: bytes, header: str = "data:image/png;base64,") -> str:
    return header + base64.b64encode(data).decode()


def taken_out(body: str | bytes, limits: MediaLimits = LIMITS) -> tuple[bytes, EarlyMedia]:
    return take_media_out(body.encode() if isinstance(body, str) else body, limits)


def put_back(value: Any, early: EarlyMedia) -> Any:
    """Every stand-in replaced by the data URL whose bytes it holds."""
    if isinstance(value, dict):
        return {put_back(key, early): put_back(item, early) for key, item in value.items()}
    if isinstance(value, list):
        return [put_back(item, early) for item in value]
    data = early.take(value) if isinstance(value, str) else None
    return value if data is None else url_of(data)


def test_large_data_urls_leave_the_body_and_come_back_by_their_stand_ins() -> None:
    pictures = [PICTURE + bytes([i]) for i in range(3)]
    document = {"messages": [{"url": url_of(picture)} for picture in pictures], "text": "a"}
    body, early = taken_out(json.dumps(document))
    assert len(body) < 300
    urls = [message["url"] for message in json.loads(body)["messages"]]
    assert early.taken == set()
    assert [early.take(url) for url in urls] == pictures
    assert early.all_taken
    assert early.take("a") is None


@pytest.mark.parametrize(
    "url",
    [
        url_of(PICTURE[:100]),
        url_of(PICTURE).replace("data:", "DATA:"),
        url_of(PICTURE).replace(";base64,", ","),
        url_of(PICTURE).rstrip("=")[:-1],
        url_of(PICTURE)[:-5] + "*" + url_of(PICTURE)[-4:],
        url_of(PICTURE).replace("A", "\\u0041", 1),
        url_of(PICTURE).replace("/", "\\/"),
        url_of(PICTURE, "data:image/png\\n;base64,"),
        url_of(PICTURE, "data:image/\n;base64,"),
        url_of(PICTURE, "data:image/é;base64,"),
        url_of(PICTURE, "data:" + "x" * 200 + ";base64,"),
        url_of(b"x" * (LIMITS.max_item_bytes + 3)),
    ],
    ids=range(12),
)
def test_what_is_spelled_otherwise_too_small_or_too_large_stays(url: str) -> None:
    body = f'{{"url": "{url}"}}'.encode()
    assert taken_out(body) == (body, EarlyMedia())


@pytest.mark.parametrize(
    "form",
    [
        '{"a": "x"%s"}',
        '{"a": "%s}',
        '{"a": "x" "%s"}',
        '"%s" "%s"',
        '{"a": "b%s"}',
        '{"a": "\\"%s\\""}',
        '{"%s": "%s"}',
    ],
)
def test_a_body_says_the_same_or_stays_invalid(form: str) -> None:
    whole = form.replace("%s", url_of(PICTURE))
    body, early = taken_out(whole)
    try:
        expected = json.loads(whole)
    except json.JSONDecodeError:
        with pytest.raises(json.JSONDecodeError):
            json.loads(body)
    else:
        assert put_back(json.loads(body), early) == expected


def test_a_key_that_comes_twice_leaves_a_stand_in_untaken() -> None:
    first, second = PICTURE + b"1", PICTURE + b"2"
    body, early = taken_out(f'{{"url": "{url_of(first)}", "url": "{url_of(second)}"}}')
    assert early.take(json.loads(body)["url"]) == second
    assert not early.all_taken


def test_a_data_url_that_is_said_as_text_is_text(server: ServerProcess) -> None:
    picture = image_part(noise(3, 24, 24))
    url = picture["image_url"]["url"]
    assert len(url) > LEAST_PAYLOAD_BYTES

    def prompt_tokens(*parts: Any) -> int:
        response = server.chat(*parts, max_tokens=1)
        assert response.status_code == 200, response.text
        return int(response.json()["usage"]["prompt_tokens"])

    few = prompt_tokens(picture, "What is it?")
    many = prompt_tokens(picture, {"type": "text", "text": url})
    assert few < 200 < many


STRINGS = st.one_of(
    st.text(max_size=12),
    st.sampled_from([PICTURE, PICTURE[:700], b"x" * (LEAST_PAYLOAD_BYTES * 3 // 4)]).map(url_of),
    st.sampled_from(['"data:', 'say "' + url_of(PICTURE) + '"', url_of(PICTURE) + "\\", url_of(PICTURE) + '"']),
)
DOCUMENTS = st.recursive(
    STRINGS | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)


@given(document=DOCUMENTS, ascii_only=st.booleans())
def test_any_document_says_the_same(document: Any, ascii_only: bool) -> None:
    body, early = taken_out(json.dumps(document, ensure_ascii=ascii_only))
    assert put_back(json.loads(body), early) == document
