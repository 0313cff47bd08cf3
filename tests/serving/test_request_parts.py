"""Messages taken apart: text and pictures in their order, every wrong part named by its place."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from prism_server.errors import BadRequest
from prism_server.identity import MediaOptions
from prism_server.media.limits import MediaLimits
from prism_server.media.link import NamedLink
from prism_server.media.messages import MediaContent, TextContent
from prism_server.serving.request_parts import ReadMessages, read_messages

LIMITS = MediaLimits(max_items=3, max_item_bytes=1000, max_decoded_pixels=10_000)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def read(*parts: Any) -> ReadMessages:
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
    assert [item.data for item in second.items({})] == [b"a", b"b"]


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
    assert [item.param for item in read.items({})] == [
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
    (item,) = read(part).items({})
    assert (item.kind, item.data, item.options) == ("image", b"a", MediaOptions())


def test_pixel_limits_travel_with_their_picture() -> None:
    (item,) = read(picture(b"a", min_pixels=1024, max_pixels=4096)).items({})
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
        ({"type": "video_url"}, ".video_url"),
        ({"type": "video_url", "video_url": {"url": 7}}, ".video_url.url"),
        ({"type": "video_url", "video_url": "/etc/passwd"}, ".video_url"),
        ({"type": "video", "video": [data_url(b"a")]}, ".fps"),
        ({"type": "video", "video": [], "fps": 2}, ".video"),
        ({"type": "video", "video": [data_url(b"a"), 7], "fps": 2}, ".video[1]"),
        ({"type": "video", "video": [data_url(b"a"), "no url"], "fps": 2}, ".video[1]"),
        ({"type": "video", "video": {"frames": [data_url(b"a")], "fps": 0}}, ".fps"),
        ({"type": "video", "video": data_url(b"a"), "fps": True}, ".fps"),
        ({"type": "video", "video": data_url(b"a"), "fps": float("inf")}, ".fps"),
        ({"type": "video", "video": data_url(b"a"), "max_frames": 0}, ".max_frames"),
        ({"type": "video", "video": data_url(b"a"), "sampling": "best"}, ".sampling"),
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


def test_links_are_named_with_their_places_and_become_items_once_their_bytes_are_there() -> None:
    content = [
        picture(b"sent"),
        {"type": "image_url", "image_url": {"url": "https://a.org/1", "max_pixels": 4096}},
        {"type": "video", "video": ["HTTPS://a.org/2", data_url(b"frame"), "https://a.org/1"], "fps": 2},
    ]
    read = read_messages([{"role": "user", "content": content}], LIMITS, fetches_links=True)
    assert read.links == (
        NamedLink("https://a.org/1", "messages[0].content[1].image_url.url", 1),
        NamedLink("HTTPS://a.org/2", "messages[0].content[2].video[0]", None),
        NamedLink("https://a.org/1", "messages[0].content[2].video[2]", None),
    )
    items = read.items({"https://a.org/1": b"one", "HTTPS://a.org/2": b"two"})
    assert [item.data for item in items] == [b"sent", b"one", b""]
    assert items[1].options == MediaOptions(max_pixels=4096)
    assert items[2].frames == (b"two", b"frame", b"one")


def test_links_are_refused_where_they_are_not_fetched() -> None:
    error = refusal([{"role": "user", "content": [{"type": "image_url", "image_url": "HTTPS://a.org/1"}]}])
    assert (error.code, error.param) == ("links_off", "messages[0].content[0].image_url")
    assert "fetch.hosts" in error.reason


FRAME_URLS = [data_url(b"a"), data_url(b"b")]
CLIP_URL = "data:video/mp4;base64," + base64.b64encode(b"clip").decode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video_url", "video_url": {"url": CLIP_URL, "fps": 2}},
        {"type": "video_url", "video_url": CLIP_URL, "fps": 2.0},
        {"type": "input_video", "video_url": {"url": CLIP_URL}, "fps": 2},
        {"type": "video", "video": CLIP_URL, "fps": 2},
        {"type": "video", "video": {"url": CLIP_URL, "fps": 2}, "fps": 3},  # what stands beside the URL counts
        {"video": CLIP_URL, "fps": 2},
    ],
)
def test_a_clip_in_any_spelling_of_the_field_is_the_same_item(part: dict[str, Any]) -> None:
    (item,) = read(part).items({})
    assert (item.kind, item.data, item.frames, item.options) == ("video", b"clip", (), MediaOptions(fps=2.0))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": FRAME_URLS, "fps": 2},
        {"type": "video", "video": {"frames": FRAME_URLS, "fps": 2}},
        {"type": "video_url", "video_url": {"frames": [{"url": url} for url in FRAME_URLS]}, "fps": 2},
    ],
)
def test_a_list_of_frames_is_one_item_in_their_order(part: dict[str, Any]) -> None:
    (item,) = read(part).items({})
    assert (item.kind, item.data, item.frames, item.options) == ("video", b"", (b"a", b"b"), MediaOptions(fps=2.0))


def test_clips_pictures_and_text_keep_their_order_and_count_together() -> None:
    clip = {"type": "video", "video": FRAME_URLS, "fps": 1}
    parts = picture(b"p"), {"type": "text", "text": "then"}, clip, picture(b"q")
    (message,) = read(*parts).messages
    assert message.parts == (
        MediaContent(0, "image"),
        TextContent("then"),
        MediaContent(1, "video"),
        MediaContent(2, "image"),
    )
    assert "at most 3" in refusal([{"role": "user", "content": [*parts, clip]}]).reason
