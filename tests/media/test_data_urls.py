"""Data URLs in every spelling: accepted, or a 400."""

from __future__ import annotations

import base64
import textwrap
from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from media_samples import LIMITS

from prism_server.errors import BadRequest
from prism_server.media.data_url import data_url_bytes
from prism_server.media.limits import MediaLimits

RAW = bytes(range(256)) * 2 + b"\xfb\xff\xfe"
BASE64 = base64.b64encode(RAW).decode()
RAGGED = RAW[:-2]
UNPADDED = base64.b64encode(RAGGED).decode().rstrip("=")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (f"data:image/png;base64,{BASE64}", RAW),
        (f"DATA:image/png;BASE64,{BASE64}", RAW),
        (f"data:image/png;charset=utf-8;base64,{BASE64}", RAW),
        (f"data:image/png; base64 ,{BASE64}", RAW),
        (f"data:;base64,{BASE64}", RAW),
        (f"  data:image/png;base64,{BASE64}\n", RAW),
        (f"data:image/png;base64,{UNPADDED}", RAGGED),
        ("data:image/png;base64," + "\r\n".join(textwrap.wrap(BASE64, 76)), RAW),
        ("data:image/png;base64,\n" + textwrap.fill(UNPADDED, 60) + "\n", RAGGED),
        (f"data:image/png;base64,{quote(BASE64, safe='')}", RAW),
        (f"data:image/png;base64,{base64.urlsafe_b64encode(RAW).decode()}", RAW),
        (f"data:image/png,{quote(RAW)}", RAW),
        ("data:,plain%20text", b"plain text"),
        ("data:image/png;base64,", b""),
    ],
)
def test_a_data_url_is_accepted_in_every_spelling(url: str, expected: bytes) -> None:
    assert data_url_bytes(url, LIMITS, "p") == expected


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (f"data:image/png;base64{BASE64}", "comma"),
        ("data:", "comma"),
        ("data:image/png;base64,????", "not valid base64"),
        ("data:image/png;base64,A", "not valid base64"),
        ("data:image/png;base64,QUJD=QUJD", "not valid base64"),
        ("data:image/png;base64,äöü\ud800", "not valid base64"),
        ("https://example.com/a.png", "https links are not served"),
        ("HTTP://example.com/a.png", "http links are not served"),
        ("file:///etc/passwd", "file links are not served"),
        ("/etc/passwd", "neither a data URL nor a link"),
        ("../a.png", "neither a data URL nor a link"),
        ("", "neither a data URL nor a link"),
        (BASE64, "neither a data URL nor a link"),
    ],
)
def test_anything_else_is_a_400_that_says_what_to_send(url: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        data_url_bytes(url, LIMITS, "messages[0].content[1].image_url.url")
    assert caught.value.param == "messages[0].content[1].image_url.url"
    assert len(caught.value.reason) < 200


@pytest.mark.parametrize("num_bytes", [96, 97, 98])
def test_the_size_limit_is_exact_and_checked_before_decoding(num_bytes: int) -> None:
    raw = bytes(num_bytes)
    exact = MediaLimits(max_items=1, max_item_bytes=num_bytes, max_decoded_pixels=1)
    below = MediaLimits(max_items=1, max_item_bytes=num_bytes - 1, max_decoded_pixels=1)
    encoded = base64.b64encode(raw).decode()
    spellings = [f"data:;base64,{encoded}", f"data:;base64,{textwrap.fill(encoded, 20)}", f"data:,{quote(raw)}"]
    for url in spellings:
        assert data_url_bytes(url, exact, "p") == raw
        with pytest.raises(BadRequest, match=f"more than {num_bytes - 1} bytes"):
            data_url_bytes(url, below, "p")
    with pytest.raises(BadRequest, match="more than"):  # not "invalid base64": it was never decoded
        data_url_bytes("data:;base64," + "?" * 1000, below, "p")


@given(st.binary(max_size=300), st.integers(1, 90))
def test_line_length_and_padding_never_matter(raw: bytes, width: int) -> None:
    encoded = base64.b64encode(raw).decode()
    lines = "\n".join(encoded[at : at + width] for at in range(0, len(encoded), width))
    for payload in (encoded, lines, encoded.rstrip("="), lines.rstrip("=")):
        assert data_url_bytes(f"data:image/jpeg;base64,{payload}", LIMITS, "p") == raw


@given(st.text(max_size=60).map(lambda text: "data:" + text) | st.text(max_size=60))
@example("data:;base64,%ff%")
@example("data:%,%")
def test_any_text_gives_bytes_or_a_400(url: str) -> None:
    try:
        answer: object = data_url_bytes(url, LIMITS, "p")
    except BadRequest as error:
        answer = error
    assert isinstance(answer, bytes) or (isinstance(answer, BadRequest) and answer.param == "p")
