"""Patches that the cache still has are copied for the device: on whose time."""

from __future__ import annotations

import random
import threading

import pytest
from engine_support import Parts, running_engine

from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample, encode_png
from prism_server.engine import owner
from prism_server.engine.staging import StagedItem
from prism_server.media.item import Patches


@pytest.mark.parametrize(
    ("most_own_copy_bytes", "thread"),
    [pytest.param(0, "prism-media", id="large"), pytest.param(1 << 20, "prism-owner", id="small")],
)
def test_large_patches_that_are_there_already_are_copied_by_a_media_worker(
    most_own_copy_bytes: int, thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (picture,) = draw_sample(random.Random(0), LAYOUT_BY_NAME["scene-96"]).pictures
    parts: Parts = (encode_png(picture), "What is shown?")
    monkeypatch.setattr(owner, "MOST_OWN_COPY_BYTES", most_own_copy_bytes)
    with running_engine() as driver:
        expected = driver.ask(parts).tokens
        driver.engine.reset_cache()
        runner, threads = driver.engine._parts.executor, list[str]()
        prepare = runner.prepare

        def watched(patches: Patches) -> StagedItem:
            threads.append(threading.current_thread().name)
            return prepare(patches)

        monkeypatch.setattr(runner, "prepare", watched)
        assert driver.ask(parts).tokens == expected
        assert driver.engine.media.stats().cache.hits == 1
    assert len(threads) == 1
    assert threads[0].startswith(thread)


def test_a_request_that_ends_before_its_copy_is_made_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    (picture,) = draw_sample(random.Random(0), LAYOUT_BY_NAME["scene-96"]).pictures
    parts: Parts = (encode_png(picture), "What is shown?")
    monkeypatch.setattr(owner, "MOST_OWN_COPY_BYTES", 0)
    with running_engine() as driver:
        expected = driver.ask(parts).tokens
        driver.engine.reset_cache()
        runner, begun, may_end = driver.engine._parts.executor, threading.Event(), threading.Event()
        prepare = runner.prepare

        def held(patches: Patches) -> StagedItem:
            begun.set()
            assert may_end.wait(60)
            return prepare(patches)

        monkeypatch.setattr(runner, "prepare", held)
        left = driver.submit(parts)
        assert begun.wait(60)
        driver.engine.cancel(left.request_id)
        assert left.wait().reason == "cancelled"
        again = driver.submit(parts)  # its own copy
        may_end.set()
        assert again.wait().tokens == expected
