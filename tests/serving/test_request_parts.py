"""Messages taken apart: text and pictures in their order, every wrong part named by its place."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from prism_server.errors import BadRequest
from prism_server.identity import MediaOptions
from prism_server.media.limits import MediaLimits
from prism_server.media.messages import MediaContent, TextContent
from prism_server.serving.request_parts import Conversation, read_messages

LIMITS = MediaLimits(max_items=3, max_item_bytes=1000, max_decoded_pixels=10_000)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def read(*parts: Any) -> Conversation:
    return read_messages([{"role": "user", "content": list(parts)}], LIMITS)


def refusal(messages: list[Any]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        read_messages(messages, LIMITS)
    return caught.value


def picture(data: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **options}}


def test_text_picture_text_and_picture_text_picture_keep_their_order() -> None:
    text = {"type": "text", "text": "between"}
    first = read(text, picture(b"a"), text)
    assert first.messages[0].parts == (TextContent("between"), MediaContent(0, "image"), TextContent("between"))
    second = read(picture(b"a"), text, picture(b"b"))
    assert second.messages[0].parts == (MediaContent(0, "image"), TextContent("between"), MediaContent(1, "image"))
    assert [item.data for item in second.media] == [b"a", b"b"]


def test_media_are_numbered_over_all_messages() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [picture(b"a")]},
        {"role": "assistant", "content": "I see"},
        {"role": "user", "content": [picture(b"b"), {"type": "text", "text": "and now?"}]},
    ]
    read = read_messages(messages, LIMITS)
    assert [message.role for message in read.messages] == ["system", "user", "assistant", "user"]
    assert read.messages[3].parts[0] == MediaContent(1, "image")
    assert [item.param for item in read.media] == [
        "messages[1].content[0].image_url.url",
        "messages[3].content[0].image_url.url",
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(b"a")}},
        {"type": "image_url", "image_url": {"url": data_url(b"a"), "detail": "high"}},
        {"type": "image_url", "image_url": data_url(b"a")},
        {"type": "input_image", "image_url": data_url(b"a")},
        {"type": "image", "image": data_url(b"a")},
        {"image_url": {"url": data_url(b"a")}},
        {"image": data_url(b"a")},
    ],
)
def test_a_picture_in_any_spelling_of_the_field_is_the_same_item(part: dict[str, Any]) -> None:
    (item,) = read(part).media
    assert (item.kind, item.data, item.options) == ("image", b"a", MediaOptions())


def test_pixel_limits_travel_with_their_picture() -> None:
    (item,) = read(picture(b"a", min_pixels=1024, max_pixels=4096)).media
    assert item.options == MediaOptions(1024, 4096)


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (5, ""),
        ({"type": "sound"}, ".type"),
        ({}, ".type"),
        ({"type": "text"}, ".text"),
        ({"type": "text", "text": 5}, ".text"),
        ({"type": "image_url"}, ".image_url"),
        ({"type": "image_url", "image_url": {}}, ".image_url.url"),
        ({"type": "image_url", "image_url": {"url": 5}}, ".image_url.url"),
        ({"type": "image_url", "image_url": 5}, ".image_url"),
        ({"type": "image_url", "image_url": "https://example.org/cat.png"}, ".image_url"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, ".image_url"),
        ({"type": "image_url", "image_url": "/etc/passwd"}, ".image_url"),
        ({"type": "image_url", "image_url": {"url": data_url(b"a"), "max_pixels": "big"}}, ".image_url.max_pixels"),
        ({"type": "image_url", "image_url": {"url": data_url(b"a"), "min_pixels": 0}}, ".image_url.min_pixels"),
        ({"type": "image_url", "image_url": {"url": data_url(b"a" * 1001)}}, ".image_url.url"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, ""),
    ],
)
def test_a_wrong_part_is_a_400_that_names_its_place(part: Any, param: str) -> None:
    error = refusal([{"role": "user", "content": ["fine", part]}])
    assert error.param == f"messages[0].content[1]{param}"
    assert error.status == 400


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "wizard", "content": "hi"}, "messages[0].role"),
        ({"role": ["user"], "content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
    ],
)
def test_a_wrong_message_is_a_400_that_names_it(message: Any, param: str) -> None:
    assert refusal([message]).param == param


def test_no_messages_and_too_many_media_are_400() -> None:
    assert refusal([]).param == "messages"
    assert refusal([{"role": "user", "content": [picture(b"a")] * 4}]).param == "messages[0].content[3]"
