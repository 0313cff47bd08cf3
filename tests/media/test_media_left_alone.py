"""Media that nobody waits for any more: the worker that decodes them is free again soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

import numpy as np
import pytest
from clip_making import Picture, clip_file, numbered
from clip_samples import LIMITS, clip, clip_pipeline, frame_list
from PIL import Image

from prism_server.media import image, qwen
from prism_server.media.containers import read_frames, read_index
from prism_server.media.item import ItemFacts, MediaItem, Unwanted
from prism_server.media.pipeline import MediaPipeline

WAIT_S = 60


@pytest.fixture
def pipeline() -> Iterator[MediaPipeline]:
    made = clip_pipeline()
    yield made
    made.close()


class Watched:
    """Pictures on their way to the model. The second one waits until the test has done what it wants to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: list[int] = []
        self.at_second, self.go_on = threading.Event(), threading.Event()
        self._cut = qwen._cut
        monkeypatch.setattr(qwen, "_cut", self)

    def __call__(self, picture: Image.Image, *rest: object) -> np.ndarray:
        self.numbers.append(len(self.numbers))
        if len(self.numbers) == 2:
            self.at_second.set()
            assert self.go_on.wait(WAIT_S)
        return self._cut(picture, *rest)  # type: ignore[arg-type]


def items() -> dict[str, MediaItem]:
    frames = numbered(30)
    return {"a file": clip(clip_file(frames, 2)), "a list": frame_list(frames, max_frames=12)}


@pytest.mark.parametrize("form", ["a file", "a list"])
def test_a_clip_that_is_being_decoded_is_left_when_its_only_client_goes(
    pipeline: MediaPipeline, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    item, watched = items()[form], Watched(monkeypatch)
    facts = pipeline.describe(item)
    future = pipeline.materialise(item, facts)
    assert watched.at_second.wait(WAIT_S)
    assert future.cancel()
    watched.go_on.set()
    with pytest.raises(CancelledError):
        future.result(WAIT_S)
    give_up_s = time.monotonic() + WAIT_S
    while pipeline.stats().cache.in_flight_now:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    again = pipeline.materialise(item, facts).result(WAIT_S)
    assert again.decoded
    assert len(watched.numbers) == 2 + 12
    stats = pipeline.stats().cache
    assert (stats.prepared, stats.failed, stats.in_flight_now) == (1, 0, 0)


@pytest.mark.parametrize("form", ["a file", "a list"])
def test_a_clip_goes_on_when_one_of_two_clients_goes(
    pipeline: MediaPipeline, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    item, watched = items()[form], Watched(monkeypatch)
    facts: ItemFacts = pipeline.describe(item)
    first, second = (pipeline.materialise(item, facts) for _ in range(2))
    assert watched.at_second.wait(WAIT_S)
    assert first.cancel()
    watched.go_on.set()
    assert second.result(WAIT_S).decoded
    assert len(watched.numbers) == 12


def test_work_between_two_shown_frames_is_left_too() -> None:
    """Frames that are only decoded to get at the next one that is shown."""
    frames: list[Picture] = [np.full((16, 16, 3), i // 4, dtype=np.uint8) for i in range(400)]
    data = clip_file(frames, 25, "matroska", options={"g": "1000", "sc_threshold": "0"})
    index = read_index(data, LIMITS, "messages")
    asked = 0

    def is_wanted() -> bool:
        nonlocal asked
        asked += 1
        return asked < 50

    shown = read_frames(data, index, np.array([0, 399], dtype=np.int32), LIMITS, "messages", is_wanted)
    next(shown)
    with pytest.raises(Unwanted):
        next(shown)
    assert asked == 50


def test_a_single_picture_is_not_asked_about(pipeline: MediaPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready sooner than anybody could leave, and then it is there for who comes next."""
    started, go_on = threading.Event(), threading.Event()
    decode = image.decode

    def slow(*arguments: object) -> Image.Image:
        started.set()
        assert go_on.wait(WAIT_S)
        return decode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(image, "decode", slow)
    item = MediaItem("image", frame_list(numbered(1)).frames[0])
    facts = pipeline.describe(item)
    future = pipeline.materialise(item, facts)
    assert started.wait(WAIT_S)
    assert future.cancel()
    go_on.set()
    pipeline.materialise(item, facts).result(WAIT_S)
    assert pipeline.stats().decoded_items == 1
