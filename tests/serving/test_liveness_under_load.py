"""Health answers, and nothing crashes, whatever comes at once. Bounds in time have tenfold slack."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
from serving_support import (
    ServerProcess,
    big_picture,
    chat_body,
    eventually,
    held_at,
    image_part,
    noise,
    serving,
    sse_events,
)

LIVEZ_P99_S = 0.1
SLACK = 10


def test_livez_answers_while_sixteen_4k_pictures_are_being_decoded_and_64_streams_run() -> None:
    options = {"engine.max_running_sequences": "80", "kv.memory_bytes": str(1 << 30)}  # a place for every token
    pictures = [image_part(big_picture(shade)) for shade in range(0, 256, 16)]
    with serving(**options) as server:
        stop = threading.Event()

        def stream() -> None:
            body = chat_body("Hello", max_tokens=3000, ignore_eos=True, stream=True)
            with httpx.stream("POST", f"{server.api}/v1/chat/completions", json=body, timeout=120) as response:
                for _ in sse_events(response):
                    if stop.is_set():
                        return

        def decode(picture: object) -> None:
            body = chat_body(picture, "What is it?", max_tokens=1)
            assert httpx.post(f"{server.api}/v1/chat/completions", json=body, timeout=240).status_code == 200

        streams = [threading.Thread(target=stream) for _ in range(64)]
        decodes = [threading.Thread(target=decode, args=(picture,)) for picture in pictures]
        for thread in streams:
            thread.start()
        eventually(lambda: server.capacity()["running"] == 64, 120)
        for thread in decodes:
            thread.start()
        waits_s: list[float] = []
        with httpx.Client(timeout=60) as health:
            while any(thread.is_alive() for thread in decodes) or len(waits_s) < 20:
                asked_s = time.monotonic()
                assert health.get(f"{server.api}/livez").status_code == 200
                waits_s.append(time.monotonic() - asked_s)
                time.sleep(0.02)
        assert server.metrics()["prism_media_cache_prepared_total"] == 16
        assert server.capacity()["running"] == 64
        stop.set()
        for thread in streams:
            thread.join()
    assert statistics.quantiles(waits_s, n=100)[98] < LIVEZ_P99_S * SLACK


def test_72_requests_at_once_on_a_server_for_4_queue_then_429_with_retry_after_and_none_crashes_it(
    tmp_path: Path,
) -> None:
    options = {"engine.max_running_sequences": "4", "engine.max_waiting_requests": "20"}
    with serving(held_at(0, tmp_path / "all have come"), **options) as server:
        answers: list[httpx.Response] = []
        client = httpx.Client(timeout=240, limits=httpx.Limits(max_connections=72))

        def ask(i: int) -> None:
            body = chat_body(image_part(noise(i % 6)), "What is it?", max_tokens=120, ignore_eos=True)
            answers.append(client.post(f"{server.api}/v1/chat/completions", json=body))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(72)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(answers) == 72 - 24, 60)
        (tmp_path / "all have come").touch()
        for thread in threads:
            thread.join()
        client.close()
        assert Counter(answer.status_code for answer in answers) == {200: 24, 429: 72 - 24}
        assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 429)
        eventually(server.is_idle, 10)
        assert server.chat("Hello", max_tokens=3).status_code == 200


def test_32_parallel_identical_requests_at_temperature_0_equal_the_serial_answer(server: ServerProcess) -> None:
    body = chat_body(image_part(noise(77)), "Describe the picture.", max_tokens=20)
    answers: list[dict] = []
    threads = [
        threading.Thread(target=lambda: answers.append(server.post("/v1/chat/completions", body).json()))
        for _ in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    serial = server.post("/v1/chat/completions", body).json()
    assert [answer["choices"] for answer in answers] == [serial["choices"]] * 32
    assert sum(answer["prism"]["decoded_items"] for answer in answers) == 1


def resident_bytes(server: ServerProcess) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_2000_different_pictures_leave_memory_flat_after_warm_up() -> None:
    """A thousand are 12 MB encoded and as much decoded: keeping either would show in every thousand after the first.

    What the allocator still takes once for itself (15 MB were seen, after some hundred pictures) shows in one of them.
    """
    options = {"media.cache_bytes": str(1 << 20), "engine.feature_cache_bytes": str(4 << 20)}

    def grown_over_a_thousand(start: int) -> int:
        before = resident_bytes(server)
        for first in range(start, start + 1000, 8):
            pictures = [image_part(noise(first + i, 64, 64)) for i in range(8)]
            assert server.chat(*pictures, "What?", max_tokens=1).status_code == 200
        return resident_bytes(server) - before

    with serving(**options) as server:
        grown_over_a_thousand(0)
        assert any(grown_over_a_thousand(start) < 6 << 20 for start in (1000, 2000, 3000))
        eventually(server.is_idle, 10)
