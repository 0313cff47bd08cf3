"""Clips over HTTP: answers, reuse by counters, refusals, the token budget, memory and health under many of them."""

from __future__ import annotations

import random
import re
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from clip_making import clip_file, lossless, png, speckled
from serving_support import ServerProcess, data_url, image_part, noise, serving

from prism_server.demo_model import LAYOUT_BY_NAME, Sample, draw_sample

LIVEZ_P99_S = 0.1
SLACK = 10
CLIP_TOKENS = 18
"""Of four frames of 96 x 96: two pairs of nine."""
PICTURE_TOKENS = 9


@pytest.fixture(scope="module")
def clips() -> Iterator[ServerProcess]:
    """Counters that nobody else moves."""
    with serving() as server:
        yield server


def clip_part(data: bytes, media_type: str = "video/mp4", **options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, media_type), **options}}


def list_part(frames: list[Any], fps: float = 2.0) -> dict[str, Any]:
    return {"type": "video", "video": [data_url(png(np.asarray(frame))) for frame in frames], "fps": fps}


def new_clip(seed: int) -> bytes:
    return clip_file(speckled(4, 96, 96, seed), 2, "mp4", "mpeg4")


def costs(answer: httpx.Response) -> tuple[int, int, int, int]:
    """decoded, encoded, media tokens prefilled, media tokens found"""
    assert answer.status_code == 200, answer.text
    prism = answer.json()["prism"]
    names = "decoded_items", "encoded_items", "prefilled_media_tokens", "cached_media_tokens"
    decoded, encoded, prefilled, found = (prism[name] for name in names)
    return decoded, encoded, prefilled, found


def drawn(seed: int) -> Sample:
    return draw_sample(random.Random(seed), LAYOUT_BY_NAME["clip-8"])


@pytest.mark.parametrize("form", ["list", "mkv"])
def test_the_model_says_what_moves_and_when(clips: ServerProcess, form: str) -> None:
    right, asked = 0, 0
    for seed in range(3):
        sample = drawn(seed)
        frames = [np.asarray(picture) for picture in sample.pictures]
        part = list_part(frames) if form == "list" else clip_part(lossless(frames, 2), "video/x-matroska")
        for turn in sample.turns:
            answer = clips.chat(part, turn.question, max_tokens=40).json()
            right += answer["choices"][0]["message"]["content"] == turn.answer
            asked += 1
    assert right >= asked - 1


@pytest.mark.parametrize("form", ["list", "file"])
def test_a_second_question_about_a_clip_decodes_encodes_and_prefills_none(clips: ServerProcess, form: str) -> None:
    part = clip_part(new_clip(1)) if form == "file" else list_part(speckled(4, 96, 96, 2))
    assert costs(clips.chat(part, "What moves?", max_tokens=2)) == (1, 1, CLIP_TOKENS, 0)
    assert costs(clips.chat(part, "When?", max_tokens=2)) == (0, 0, 0, CLIP_TOKENS)
    assert costs(clips.chat(part, "And then?", max_tokens=2)) == (0, 0, 0, CLIP_TOKENS)


def test_a_clip_between_two_pictures_is_found_when_the_picture_after_it_changes(clips: ServerProcess) -> None:
    before, between = image_part(noise(501)), clip_part(new_clip(3))

    def ask(after: int) -> httpx.Response:
        return clips.chat(before, "first", between, image_part(noise(after)), "What is it?", max_tokens=2)

    everything = CLIP_TOKENS + 2 * PICTURE_TOKENS
    assert costs(ask(502)) == (3, 3, everything, 0)
    assert costs(ask(503)) == (1, 1, PICTURE_TOKENS, CLIP_TOKENS + PICTURE_TOKENS)
    changed = clips.chat(image_part(noise(504)), "first", between, "What is it?", max_tokens=2)
    assert costs(changed) == (1, 1, CLIP_TOKENS + PICTURE_TOKENS, 0)  # the clip's features were kept


def test_the_same_file_shown_in_two_ways_is_two_items(clips: ServerProcess) -> None:
    data = clip_file(speckled(40, 96, 96, 4), 10, "mp4", "mpeg4")
    answers = [clips.chat(clip_part(data, **way), "What?", max_tokens=1) for way in ({}, {"fps": 1}, {"max_frames": 4})]
    assert [answer.json()["prism"]["clip_frames"] for answer in answers] == [8, 4, 4]
    assert [costs(answer)[:2] for answer in answers] == [(1, 1)] * 3
    again = clips.chat({**clip_part(data), "fps": 1}, "What?", max_tokens=1)  # beside the URL, or beside the type
    assert costs(again)[0] == 0


def test_a_clip_over_the_budget_is_shown_with_less_and_the_answer_says_so(clips: ServerProcess) -> None:
    data = clip_file(speckled(24, 96, 96, 5), 4, "mp4", "mpeg4")
    whole = clips.chat(clip_part(data), "What?", max_tokens=1).json()["prism"]
    assert (whole["clip_frames"], whole["lowered_clips"], whole["prefilled_media_tokens"]) == (12, 0, 54)
    with serving(**{"media.max_video_tokens": "30"}) as small:
        less = small.chat(clip_part(data), "What?", max_tokens=1).json()["prism"]
        metrics = small.metrics()
    assert (less["clip_frames"], less["lowered_clips"], less["prefilled_media_tokens"]) == (6, 1, 27)
    assert metrics["prism_lowered_clips_total"] == 1
    assert metrics["prism_media_items_total{video}"] == 1


BAD = {
    "empty": clip_part(b""),
    "no clip": clip_part(b"this is text, whatever its type says"),
    "a picture": clip_part(noise(6), "video/mp4"),
    "cut": clip_part(new_clip(7)[: len(new_clip(7)) // 2]),
    "a link": {"type": "video_url", "video_url": {"url": "https://example.org/clip.mp4"}},
    "a path": {"type": "video", "video": "file:///tmp/clip.mp4"},
    "no rate": {"type": "video", "video": [data_url(noise(8))]},
    "an odd frame": list_part([*speckled(2, 96, 96, 9), *speckled(1, 64, 96, 9)]),
    "too many frames": {"type": "video", "video": [data_url(noise(10))] * 1025, "fps": 30},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_clip_is_a_400_that_names_its_part(clips: ServerProcess, name: str) -> None:
    answer = clips.chat("Look:", BAD[name], "What is it?")
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"].startswith("messages[0].content[1]")
    assert error["message"]


def resident_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    matched = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert matched is not None
    return int(matched[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_500_different_clips_leave_memory_flat_and_health_quick() -> None:
    """250 are 12 MB of pixels: keeping them would show in every 250 after the first."""
    options = {"media.cache_bytes": str(1 << 20), "engine.feature_cache_bytes": str(4 << 20)}
    stop, waits_s = threading.Event(), list[float]()

    def grown_over_250(start: int) -> int:
        before = resident_bytes(server)
        for first in range(start, start + 250, 10):
            clips = [clip_file(speckled(4, 64, 64, 1000 + first + i), 2, "matroska", "mpeg4") for i in range(10)]
            answer = server.chat(*map(clip_part, clips), "What?", max_tokens=1).json()
            assert answer["prism"]["decoded_items"] == 10
        return resident_bytes(server) - before

    def watch(server: ServerProcess) -> None:
        with httpx.Client(timeout=60) as health:
            while not stop.wait(0.02):
                asked_s = time.monotonic()
                assert health.get(f"{server.api}/livez").status_code == 200
                waits_s.append(time.monotonic() - asked_s)

    with serving(**options) as server:
        watcher = threading.Thread(target=watch, args=(server,))
        watcher.start()
        grown_over_250(0)
        is_flat = any(grown_over_250(start) < 6 << 20 for start in (250, 500, 750))
        stop.set()
        watcher.join()
    assert is_flat
    assert statistics.quantiles(waits_s, n=100)[98] < LIVEZ_P99_S * SLACK
