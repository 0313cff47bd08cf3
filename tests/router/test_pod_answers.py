"""Answers of pods, read; and what is no answer of a pod, refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prism_server.identity import LinkContent, framed_digest
from prism_server.router.cache_answer import AnswerError, parse_cache
from prism_server.router.pods import PodLoad

KEY = framed_digest("key", ())
IDENTITY = {"key_version": 1, "namespace": KEY.hex(), "layout": "f00", "page_tokens": 64}
LOAD = {
    "epoch": "e",
    "total_pages": 100,
    "inside": 3,
    "max_running": 8,
    "max_waiting": 4,
    "phase": "ready",
    "model": "m",
}
CACHE: dict[str, Any] = {
    "epoch": "e",
    "cursor": 5,
    "snapshot": False,
    "chains_added": [KEY.hex()],
    "chains_evicted": [],
    "features_added": [],
    "features_evicted": [KEY.hex()],
    "load": LOAD,
}


def body(*parts: dict[str, Any]) -> bytes:
    return json.dumps({name: value for part in parts for name, value in part.items()}).encode()


def test_a_cache_answer_is_read_with_and_without_what_may_be_left_out() -> None:
    plain = parse_cache(body(IDENTITY, CACHE))
    assert (plain.scheme.key_version, plain.scheme.namespace) == (1, KEY)
    assert (plain.epoch, plain.cursor, plain.is_snapshot, plain.chains_added) == ("e", 5, False, (KEY,))
    assert (plain.features_evicted, plain.links) == ((KEY,), ())
    assert plain.load == PodLoad(total_pages=100, inside=3, max_inside=12)
    link = {"url_digest": KEY.hex(), "content_id": KEY.hex()}
    more = {"uncached_tokens": 70, "ms_per_token": 0.5, "ms_per_patch": 0.25}
    full = parse_cache(body(IDENTITY, CACHE, {"links": [link], "load": LOAD | more, "of_the_future": 1}))
    assert full.links == (LinkContent(KEY, KEY),)
    assert (full.load.uncached_tokens, full.load.ms_per_token, full.load.ms_per_patch) == (70, 0.5, 0.25)


@pytest.mark.parametrize(("phase", "is_draining"), [("ready", False), ("leaving", True), ("draining", True)])
def test_an_answer_says_whether_the_pod_drains(phase: str, is_draining: bool) -> None:
    assert parse_cache(body(IDENTITY, CACHE, {"load": LOAD | {"phase": phase}})).load.is_draining is is_draining


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"<html>",
        body(IDENTITY),
        body(CACHE),
        body(IDENTITY, CACHE, {"chains_added": ["xyz"]}),
        body(IDENTITY, CACHE, {"chains_added": ["f00d"]}),
        body(IDENTITY, CACHE, {"cursor": "5"}),
        body(IDENTITY, CACHE, {"load": None}),
        body(IDENTITY, CACHE, {"namespace": "ff"}),
    ],
)
def test_what_is_no_answer_of_a_pod_is_an_answer_error(wrong: bytes) -> None:
    with pytest.raises(AnswerError):
        parse_cache(wrong)
