"""Page keys and boundaries of whole prompts: what shares a key, what must not, and vectors that pin them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_server.identity import MediaOptions, MediaPart, PageSpan, TextPart, cache_seed, media_chain_keys, page_key
from prism_server.media.item import ItemFacts, ItemKey, MediaItem
from prism_server.media.messages import MediaContent, Message, TextContent
from prism_server.prompt.encoded import EncodedPrompt, MediaSpan
from prism_server.prompt.keys import PageChain, boundaries

PAGE = 16


def ask(encoder: Any, *parts: str | tuple[ItemFacts, MediaItem], salt: str | None = None) -> EncodedPrompt:
    """One user turn; each picture is an item of its own."""
    content: list[TextContent | MediaContent] = []
    items: list[tuple[ItemFacts, MediaItem]] = []
    for part in parts:
        if isinstance(part, str):
            content.append(TextContent(part))
        else:
            content.append(MediaContent(len(items), "image"))
            items.append(part)
    facts, media = [f for f, _ in items], [m for _, m in items]
    prompt: EncodedPrompt = encoder.encode_chat([Message("user", tuple(content))], facts, media, salt)
    return prompt


def num_shared_pages(a: EncodedPrompt, b: EncodedPrompt) -> int:
    """Pages that the two prompts share; shared keys can only be a common beginning."""
    shared = set(a.page_keys) & set(b.page_keys)
    assert a.page_keys[: len(shared)] == b.page_keys[: len(shared)]
    return len(shared)


def test_the_same_prompt_with_another_picture_shares_no_page_from_the_picture_on(
    make_encoder: Any, make_picture: Any
) -> None:
    encoder = make_encoder()
    red, blue = make_picture(128, 128, b"red"), make_picture(128, 128, b"blue")
    first, second, third = (ask(encoder, picture, "what colour?") for picture in (red, blue, red))
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    assert num_shared_pages(first, second) == 0
    assert first.boundaries[0].key != second.boundaries[0].key
    assert first.boundaries[0].media_key != second.boundaries[0].media_key
    assert (first.page_keys, first.boundaries) == (third.page_keys, third.boundaries)


def test_pictures_with_equal_tokens_and_other_shapes_never_share(make_encoder: Any, make_picture: Any) -> None:
    encoder = make_encoder()
    wide, tall = make_picture(32, 160, b"wide"), make_picture(160, 32, b"tall")
    assert num_shared_pages(ask(encoder, wide, "a"), ask(encoder, tall, "a")) == 0


def test_the_same_bytes_under_two_layouts_never_share(make_encoder: Any, make_picture: Any) -> None:
    encoder = make_encoder()
    one, other = make_picture(128, 128, layout=b"1" * 32), make_picture(128, 128, layout=b"2" * 32)
    a, b = ask(encoder, one, "what?"), ask(encoder, other, "what?")
    assert num_shared_pages(a, b) == 0
    assert a.boundaries[0].key != b.boundaries[0].key


def test_the_same_picture_after_another_left_context_never_shares(make_encoder: Any, make_picture: Any) -> None:
    encoder = make_encoder()
    picture = make_picture(128, 128)
    a, b = ask(encoder, "left", picture, "q"), ask(encoder, "port", picture, "q")
    assert num_shared_pages(a, b) == 0
    assert a.boundaries[0].key != b.boundaries[0].key


def test_the_same_picture_at_another_offset_never_shares() -> None:
    """Rows that look alike, one row of the item apart: the offset alone tells them apart."""
    facts = ItemFacts(ItemKey(b"c" * 32, b"l" * 32), "image", (1, 16, 16), 64, 256, 256)
    ids = np.full(PAGE, 9, dtype=np.int32)
    keys = {
        PageChain(b"s" * 32, ids, [MediaSpan(0, PAGE, PAGE, 0, facts, item_offset=offset)], PAGE).page_keys
        for offset in range(3)
    }
    assert len(keys) == 3


def test_one_picture_twice_in_one_prompt_has_right_positions_and_two_keys(make_encoder: Any, make_picture: Any) -> None:
    encoder = make_encoder()
    picture = make_picture(128, 128)
    twice = ask(encoder, picture, "and", picture, "same?")
    first, second = twice.spans
    assert first.facts.key == second.facts.key
    for span in twice.spans:
        time, height, width = twice.positions[:, span.start : span.end]
        assert (time == time[0]).all()
        assert (height - time[0]).tolist() == [row for row in range(4) for _ in range(4)]
        assert (width - time[0]).tolist() == [*range(4)] * 4
    assert twice.positions[0, second.start] > twice.positions[0, first.start]
    assert len({boundary.key for boundary in twice.boundaries}) == 2
    assert len({boundary.media_key for boundary in twice.boundaries}) == 2
    facts, item = picture
    parts = (MediaContent(0, "image"), TextContent("and"), MediaContent(0, "image"), TextContent("same?"))
    shared_item = encoder.encode_chat([Message("user", parts)], [facts], [item])
    assert shared_item.page_keys == twice.page_keys
    assert shared_item.boundaries == twice.boundaries


def test_another_question_about_the_same_pictures_shares_up_to_the_last_boundary(
    make_encoder: Any, make_picture: Any
) -> None:
    encoder = make_encoder()
    pictures = [make_picture(96, 128, bytes([i])) for i in range(8)]
    a = ask(encoder, *pictures, "What is the total?")
    b = ask(encoder, *pictures, "Who?")
    assert a.boundaries == b.boundaries
    assert num_shared_pages(a, b) == a.spans[-1].close // PAGE
    changed = [*pictures[:4], make_picture(96, 128, b"new"), *pictures[5:]]
    c = ask(encoder, *changed, "Who?")
    same = [x == y for x, y in zip(a.boundaries, c.boundaries, strict=True)]
    assert same == [True] * 4 + [False] * 4


def test_namespaces_and_salts_share_nothing(make_encoder: Any, make_picture: Any) -> None:
    picture = make_picture(128, 128)
    prompts = [
        ask(make_encoder(), picture, "what?"),
        ask(make_encoder(model="other"), picture, "what?"),
        ask(make_encoder(), picture, "what?", salt="alice"),
        ask(make_encoder(), picture, "what?", salt=""),
    ]
    for i, a in enumerate(prompts):
        for b in prompts[:i]:
            assert num_shared_pages(a, b) == 0
            assert a.boundaries[0].key != b.boundaries[0].key
            assert a.boundaries[0].media_key != b.boundaries[0].media_key


def test_a_boundary_carries_the_media_chain_key_that_the_request_alone_gives(
    make_encoder: Any, make_picture: Any
) -> None:
    encoder = make_encoder()
    (facts, _), (other, plain) = make_picture(128, 128, b"one"), make_picture(64, 64, b"two")
    options = MediaOptions(min_pixels=None, max_pixels=16384)
    messages = [
        Message("system", (TextContent("Be brief."),)),
        Message("user", (TextContent("first"), MediaContent(0, "image"), TextContent("a"), TextContent("b"))),
        Message("assistant", (TextContent("yes"),)),
        Message("user", (MediaContent(1, "image"), TextContent("and?"))),
    ]
    prompt = encoder.encode_chat(messages, [facts, other], [MediaItem("image", b"one", options), plain], "salt")
    keys = media_chain_keys(
        cache_seed(encoder.namespace, "salt"),
        [
            TextPart("system", "Be brief."),
            TextPart("user", "first"),
            MediaPart("user", "image", facts.key.content_id, options),
            TextPart("user", "a"),
            TextPart("user", "b"),
            TextPart("assistant", "yes"),
            MediaPart("user", "image", other.key.content_id, MediaOptions()),
        ],
    )
    assert [boundary.media_key for boundary in prompt.boundaries] == keys
    assert [boundary.rows for boundary in prompt.boundaries] == [span.close for span in prompt.spans]


def test_a_boundary_at_a_pages_end_has_that_pages_key(make_encoder: Any, make_picture: Any) -> None:
    encoder = make_encoder()
    picture = make_picture(128, 128)
    for words in range(1, 40):
        prompt = ask(encoder, "a" * words, picture, "what is on the page?")
        boundary = prompt.boundaries[0]
        assert boundary.rows == prompt.spans[0].close
        if boundary.rows % PAGE == 0:
            assert boundary.key == prompt.page_keys[boundary.rows // PAGE - 1]
            return
        assert boundary.key not in prompt.page_keys
    pytest.fail("no prompt had a picture that closes at a page's end")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_key_is_the_key_of_its_rows_and_overlaps_alone(data: st.DataObject) -> None:
    """The chain against a definition that looks at one row at a time."""
    page = data.draw(st.integers(1, 7))
    row, spans = 0, list[MediaSpan]()
    for i in range(data.draw(st.integers(0, 4))):
        start = row + data.draw(st.integers(0, 5))
        rows = data.draw(st.integers(1, 12))
        facts = ItemFacts(ItemKey(bytes([i]) * 32, b"l" * 32), "image", (1, 2 * rows, 2), rows, 32, 32 * rows)
        spans.append(MediaSpan(start, rows, start + rows + 1, i, facts, data.draw(st.integers(0, 3))))
        row = start + rows + 1
    ids = np.arange(row + data.draw(st.integers(1, 9)), dtype=np.int32)
    of_row = {r: span for span in spans for r in range(span.start, span.end)}

    def key(parent: bytes, start: int, end: int) -> bytes:
        overlaps = []
        for span in spans:
            mine = [r for r in range(start, end) if of_row.get(r) is span]
            if mine:
                offset = mine[0] - span.start + span.item_offset
                names = (span.facts.key.content_id, span.facts.key.layout)
                overlaps.append(PageSpan(mine[0] - start, len(mine), *names, offset))
        return page_key(parent, ids[start:end], overlaps)

    parents = [b"s" * 32]
    for start in range(0, len(ids) - page + 1, page):
        parents.append(key(parents[-1], start, start + page))
    chain = PageChain(b"s" * 32, ids, spans, page)
    assert list(chain.page_keys) == parents[1:]
    for boundary in boundaries(chain, spans, [b"m"] * len(spans)):
        first = (boundary.rows - 1) // page
        assert boundary.key == key(parents[first], first * page, boundary.rows)


def test_golden_page_keys_and_boundaries() -> None:
    """Two pictures over five pages of 16 and a rest; pins the chain against change by accident."""
    one = ItemFacts(ItemKey(bytes(range(32)), b"\x01" * 32), "image", (1, 8, 10), 20, 160, 128)
    two = ItemFacts(ItemKey(bytes(range(32, 64)), b"\x02" * 32), "image", (1, 12, 10), 30, 160, 192)
    spans = [MediaSpan(5, 20, 26, 0, one), MediaSpan(33, 30, 64, 1, two)]
    chain = PageChain(b"\x07" * 32, np.arange(90, dtype=np.int32), spans, 16)
    assert [key.hex() for key in chain.page_keys] == GOLDEN_PAGES
    found = boundaries(chain, spans, [b"a" * 32, b"b" * 32])
    assert [(boundary.rows, boundary.key.hex()) for boundary in found] == GOLDEN_BOUNDARIES


GOLDEN_PAGES = [
    "201a9d4de1198d6dbf7e734b2ea55e03bbb6faf9448f222b4a3ed9f488567dfc",
    "1e341a63164e391342db0e071a5d9c7e9d1f63215c845c68587fff13d1a1b308",
    "d27f7e324b045764b6db466d7bfa0ec4587dbaeebde97258005a42cb495ccd93",
    "787a31f9e97223e958a1fcb65b498650501228fd5a4730a6c8717202a8ab2c6b",
    "47edca8f51f3a4667f468e53740e48c6d16e1b3f5b27862043307bd087274fdc",
]
GOLDEN_BOUNDARIES = [
    (26, "32c77d5dfca687ef8aa6480d5c95e1d6615fd459452871164c7b9f26c21dcb72"),
    (64, "787a31f9e97223e958a1fcb65b498650501228fd5a4730a6c8717202a8ab2c6b"),
]
