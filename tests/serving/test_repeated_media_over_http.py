"""The product's promise, by counters over HTTP: media seen before cost no decode, no encoder, no prefill."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from serving_support import ServerProcess, encoded, image_part, noise, serving

from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample

TOKENS_A_PICTURE = 9  # 96 x 96 pixels
FRESH = itertools.count(1000)

LIMITS: list[dict[str, int]] = [{}, {"max_pixels": 64 * 64}]

COUNTERS = {
    "decoded": "prism_decoded_items_total",
    "encoded": "prism_encoded_items_total",
    "prefilled_media": "prism_prefilled_tokens_total{vision}",
    "hit_media": "prism_prefix_hit_tokens_total{vision}",
    "media_cache_prepared": "prism_media_cache_prepared_total",
    "engine_encoded": "prism_engine_encoded_items_total",
}


@dataclass(frozen=True)
class Costs:
    """What one request moved: the server's counters and its own report agree."""

    decoded: int
    encoded: int
    prefilled_media: int
    hit_media: int


@pytest.fixture(scope="module")
def own_server() -> Iterator[ServerProcess]:
    """Counters that nobody else moves."""
    with serving() as server:
        yield server


def ask(server: ServerProcess, pictures: list[bytes], question: str) -> Costs:
    before = server.metrics()
    parts: list[Any] = [*map(image_part, pictures), question]
    answer = server.chat(*parts, max_tokens=4)
    assert answer.status_code == 200, answer.text
    after = server.metrics()
    moved = {name: int(after[series] - before.get(series, 0)) for name, series in COUNTERS.items()}
    prism = answer.json()["prism"]
    assert moved["decoded"] == moved["media_cache_prepared"] == prism["decoded_items"]
    assert moved["encoded"] == moved["engine_encoded"] == prism["encoded_items"]
    assert moved["prefilled_media"] == prism["prefilled_media_tokens"]
    assert moved["hit_media"] == prism["cached_media_tokens"]
    return Costs(moved["decoded"], moved["encoded"], moved["prefilled_media"], moved["hit_media"])


def eight() -> list[bytes]:
    return [noise(next(FRESH)) for _ in range(8)]


def test_a_second_question_about_eight_pictures_decodes_encodes_and_prefills_none(own_server: ServerProcess) -> None:
    pictures = eight()
    all_rows = 8 * TOKENS_A_PICTURE
    assert ask(own_server, pictures, "What is on page 1?") == Costs(8, 8, all_rows, 0)
    assert ask(own_server, pictures, "What is the total on page 7?") == Costs(0, 0, 0, all_rows)
    assert ask(own_server, pictures, "And?") == Costs(0, 0, 0, all_rows)


@pytest.mark.parametrize("place", [8, 4, 0])
def test_one_new_picture_costs_itself_and_the_prefill_of_what_follows_it(own_server: ServerProcess, place: int) -> None:
    """Rows before it are found; those after have another left context, but need no decode and no encoder again."""
    pictures = eight()
    ask(own_server, pictures, "What is on page 1?")
    changed = [*pictures[:place], noise(next(FRESH)), *pictures[place:]]
    costs = ask(own_server, changed, "What is on page 1?")
    following = len(changed) - place
    assert costs == Costs(1, 1, following * TOKENS_A_PICTURE, place * TOKENS_A_PICTURE)


def test_the_same_picture_twice_in_one_prompt_is_prepared_once(own_server: ServerProcess) -> None:
    picture = noise(next(FRESH))
    assert ask(own_server, [picture, picture], "Same?") == Costs(1, 1, 2 * TOKENS_A_PICTURE, 0)


def test_same_prompt_same_size_other_picture_asked_a_b_a(own_server: ServerProcess) -> None:
    """Answers differ, B is no hit, the second A is."""

    def shown(seed: int) -> bytes:
        return encoded(draw_sample(random.Random(seed), LAYOUT_BY_NAME["scene-96"]).pictures[0])

    def ask(picture: bytes) -> dict[str, Any]:
        return own_server.chat(image_part(picture), "Describe the picture.", max_tokens=40).json()

    a, b, again = ask(shown(1)), ask(shown(2)), ask(shown(1))
    assert a["choices"] == again["choices"] != b["choices"]
    assert [answer["prism"]["cached_media_tokens"] for answer in (a, b, again)] == [0, 0, TOKENS_A_PICTURE]


def test_the_same_bytes_under_two_pixel_limits_are_two_items(own_server: ServerProcess) -> None:
    picture = noise(next(FRESH), 128, 128)
    costs = [own_server.chat(image_part(picture, **limit), "What is it?", max_tokens=1).json() for limit in LIMITS]
    assert [cost["prism"]["prefilled_media_tokens"] for cost in costs] == [16, 4]
    assert [cost["prism"]["decoded_items"] for cost in costs] == [1, 1]


def test_another_salt_shares_no_kv(own_server: ServerProcess) -> None:
    pictures = eight()
    ask(own_server, pictures, "What is on page 1?")
    other = own_server.chat(*map(image_part, pictures), "What is on page 1?", cache_salt="tenant-b", max_tokens=2)
    assert other.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_prefix_cache_off_prefills_everything_again_with_the_same_answer() -> None:
    pictures = [noise(next(FRESH)) for _ in range(2)]
    with serving(**{"kv.prefix_cache": "false", "kv.dtype": "fp32"}) as cold:
        answers = [cold.chat(*map(image_part, pictures), "What is it?").json() for _ in range(2)]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 0]
    assert answers[0]["choices"] == answers[1]["choices"]
