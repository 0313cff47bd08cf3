"""Answers of pods, read; and what is no answer of a pod, refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prism_server.identity import framed_digest
from prism_server.router.pods import AnswerError, LinkContent, parse_cache, parse_capacity

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
}


def body(*parts: dict[str, Any]) -> bytes:
    return json.dumps({name: value for part in parts for name, value in part.items()}).encode()


def test_a_cache_answer_is_read_with_and_without_its_later_fields() -> None:
    plain = parse_cache(body(IDENTITY, CACHE))
    assert (plain.epoch, plain.cursor, plain.is_snapshot, plain.chains_added) == ("e", 5, False, (KEY,))
    assert (plain.features_evicted, plain.links, plain.load) == ((KEY,), (), None)
    link = {"url_digest": KEY.hex(), "content_id": KEY.hex()}
    full = parse_cache(body(IDENTITY, CACHE, {"links": [link], "load": LOAD, "of_the_future": 1}))
    assert full.links == (LinkContent(KEY, KEY),)
    assert full.load is not None
    assert full.load.max_inside == 12


@pytest.mark.parametrize(("phase", "is_draining"), [("ready", False), ("leaving", True), ("draining", True)])
def test_a_capacity_answer_says_whether_the_pod_drains(phase: str, is_draining: bool) -> None:
    scheme, load = parse_capacity(body(IDENTITY, LOAD, {"phase": phase, "uncached_tokens": 70}))
    assert (scheme.key_version, scheme.namespace, load.uncached_tokens) == (1, KEY, 70)
    assert load.is_draining is is_draining


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
        body(IDENTITY, CACHE, {"namespace": "ff"}),
    ],
)
def test_what_is_no_answer_of_a_pod_is_an_answer_error(wrong: bytes) -> None:
    with pytest.raises(AnswerError):
        parse_cache(wrong)
