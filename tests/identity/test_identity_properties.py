"""No two different things have one key, and one thing has one key however it is spelled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_server.identity import (
    ChainPart,
    MediaOptions,
    MediaPart,
    PageSpan,
    TextPart,
    cache_seed,
    content_id,
    framed_digest,
    layout_digest,
    media_chain_keys,
    namespace_digest,
    page_key,
)

SEED = b"s" * 32
BYTES = st.binary(max_size=3)
FIELDS = st.none() | st.booleans() | st.integers(-2, 12) | st.text("01ab\ud800", max_size=3) | BYTES
DIGESTS = st.sampled_from([b"1" * 32, b"2" * 32])
AREAS = st.none() | st.integers(1, 3)
TEXT_PARTS = st.builds(TextPart, st.sampled_from(["user", "system"]), st.text("ab", max_size=2))
MEDIA_PARTS = st.builds(
    MediaPart,
    st.sampled_from(["user", "tool"]),
    st.sampled_from(["image", "video"]),
    DIGESTS,
    st.builds(MediaOptions, AREAS, AREAS),
)


def typed(fields: list[object]) -> list[tuple[type, object]]:
    """Python says that True == 1; keys must not."""
    return [(type(field), field) for field in fields]


@settings(max_examples=500)
@given(st.lists(FIELDS, max_size=5), st.lists(FIELDS, max_size=5), st.sampled_from(["a", "b"]))
def test_framing_is_unambiguous(a: list[object], b: list[object], tag: str) -> None:
    same = typed(a) == typed(b) and tag == "a"
    assert (framed_digest("a", a) == framed_digest(tag, b)) is same  # type: ignore[arg-type]


@given(st.lists(BYTES, min_size=1, max_size=4), st.integers(0, 3))
def test_moving_a_byte_over_a_fields_border_changes_the_digest(fields: list[bytes], at: int) -> None:
    left, right = fields[: at % len(fields)], fields[at % len(fields) :]
    joined = [b"".join(left), b"".join(right)]
    assert (framed_digest("t", joined) == framed_digest("t", fields)) is (joined == fields)


def test_a_view_of_bytes_is_the_same_content() -> None:
    data = b"\x89PNG picture"
    assert content_id("image", memoryview(data)) == content_id("image", data)
    assert content_id("image", memoryview(b"xx" + data)[2:]) == content_id("image", data)
    assert content_id("image", data) != content_id("video", data)
    assert len(content_id("image", data)) == 32


def test_a_layout_does_not_depend_on_the_order_of_its_options() -> None:
    options = {"a": 1, "b": None, "c": "x"}
    assert layout_digest("image", options) == layout_digest("image", dict(reversed(options.items())))
    for other in ({"a": 1, "b": None}, {**options, "b": 0}, {**options, "c": 1}, {"a": 1, "b": None, "d": "x"}):
        assert layout_digest("image", options) != layout_digest("image", other)
    assert layout_digest("image", options) != layout_digest("video", options)


def test_every_part_of_a_namespace_and_the_salt_count() -> None:
    fields = ["model", "revision", "fp8", "processor"]
    namespaces = {namespace_digest(*fields)}
    for i in range(4):
        namespaces.add(namespace_digest(*[field + "x" * (i == j) for j, field in enumerate(fields)]))
    namespaces.add(namespace_digest("modelr", "evision", "fp8", "processor"))
    assert len(namespaces) == 6
    assert len({cache_seed(n, salt) for n in namespaces for salt in (None, "", "a")}) == 18


@settings(max_examples=300)
@given(st.lists(TEXT_PARTS | MEDIA_PARTS, max_size=5), st.lists(TEXT_PARTS | MEDIA_PARTS, max_size=5))
def test_media_keys_are_equal_exactly_when_all_that_was_said_before_is_equal(
    a: list[ChainPart], b: list[ChainPart]
) -> None:
    def prefixes(parts: list[ChainPart]) -> list[list[ChainPart]]:
        return [parts[: i + 1] for i, part in enumerate(parts) if isinstance(part, MediaPart)]

    for said_a, key_a in zip(prefixes(a), media_chain_keys(SEED, a), strict=True):
        for said_b, key_b in zip(prefixes(b), media_chain_keys(SEED, b), strict=True):
            assert (key_a == key_b) is (said_a == said_b)


def test_text_after_the_last_medium_does_not_count_for_the_media_chain() -> None:
    media: list[ChainPart] = [TextPart("user", "a"), MediaPart("user", "image", SEED)]
    assert media_chain_keys(SEED, media) == media_chain_keys(SEED, [*media, TextPart("user", "question")])
    assert media_chain_keys(SEED, [TextPart("user", "a")]) == []
    assert media_chain_keys(SEED, media) != media_chain_keys(b"t" * 32, media)


def test_every_field_of_a_page_counts() -> None:
    tokens = np.arange(8, dtype=np.int32)
    span = PageSpan(1, 4, b"c" * 32, b"l" * 32, 2)
    variants = [
        page_key(SEED, tokens, [span]),
        page_key(b"t" * 32, tokens, [span]),
        page_key(SEED, tokens[:7], [span]),
        page_key(SEED, tokens + 1, [span]),
        page_key(SEED, tokens, []),
        page_key(SEED, tokens, [span, replace(span, start=5, rows=1)]),
        *(
            page_key(SEED, tokens, [replace(span, **{name: value})])
            for name, value in (
                ("start", 2),
                ("rows", 3),
                ("content_id", b"d" * 32),
                ("layout", b"m" * 32),
                ("offset", 3),
            )
        ),
    ]
    assert len(set(variants)) == len(variants)


def test_a_page_key_depends_on_the_ids_and_not_on_how_they_lie_in_memory() -> None:
    tokens = np.arange(8, dtype=np.int32)
    expected = page_key(SEED, tokens, [])
    assert page_key(SEED, np.arange(16, dtype=np.int32)[:8], []) == expected
    assert page_key(SEED, np.repeat(tokens, 2)[::2], []) == expected
    assert page_key(SEED, tokens.astype(np.int64).astype(">i4"), []) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "rows", "offset"), [(-1, 1, 0), (0, 0, 0), (0, 1, -1)])
def test_a_page_span_that_cannot_be_is_an_error(start: int, rows: int, offset: int) -> None:
    with pytest.raises(ValueError, match="a page span needs"):
        PageSpan(start, rows, SEED, SEED, offset)
