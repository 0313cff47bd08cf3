"""An engine that stands still is noticed, and ends the process instead of looking alive."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving_support import ServerProcess, chat_body, eventually, serving, sse_events

from prism_server.serving.watchdog import Watchdog, step_limit_s


def looks(dog: Watchdog, *turns: tuple[float | None, float]) -> list[bool]:
    """`(when the turn began, now)` for each look."""
    return [dog.bites(began_s, now_s) for began_s, now_s in turns]


def test_a_turn_that_lasts_longer_than_the_limit_is_a_fault() -> None:
    dog = Watchdog(1.0)
    assert looks(dog, *((7.0, 7.0 + i / 2) for i in range(5))) == [False, False, False, True, True]


def test_an_engine_that_sleeps_or_goes_on_is_left_alone_however_long() -> None:
    assert not any(looks(Watchdog(1.0), *((None, float(now_s)) for now_s in range(100))))
    assert not any(looks(Watchdog(1.0), *((float(now_s), now_s + 0.5) for now_s in range(100))))


def test_time_in_which_the_process_itself_stood_still_does_not_count() -> None:
    dog = Watchdog(5.0)
    assert looks(dog, (7.0, 7.1), (7.0, 3600.0), (7.0, 3600.1)) == [False, False, False]


def test_a_limit_of_zero_is_none() -> None:
    assert not any(looks(Watchdog(0.0), *((7.0, 7.0 + now_s) for now_s in range(1000))))


def test_without_a_limit_of_its_own_a_step_on_a_cpu_may_take_as_long_as_it_does() -> None:
    assert step_limit_s(None, "cpu") == 0
    assert step_limit_s(None, "cuda:0") == 300
    assert [step_limit_s(7.5, device) for device in ("cpu", "cuda")] == [7.5, 7.5]


STUCK = """
import threading
from prism_server.engine import runner
execute, steps = runner.Runner.execute, iter(range(30))
def stuck(self, plan):
    if next(steps, None) is None:
        threading.Event().wait()
    return execute(self, plan)
runner.Runner.execute = stuck
"""
"""The device's thread, and whoever waits for it, stands still at the thirtieth step."""


@pytest.fixture
def stuck_server() -> Iterator[ServerProcess]:
    with serving(STUCK, **{"engine.step_timeout_s": "4", "http.drain_timeout_s": "3600"}) as server:
        yield server


@pytest.mark.parametrize("is_told_to_stop", [False, True])
def test_a_device_that_stands_still_ends_everyone_with_an_error_and_the_process_with_a_reason(
    stuck_server: ServerProcess, is_told_to_stop: bool
) -> None:
    """Also where it was told to stop before anybody could know: that is no orderly end, and not worth waiting for."""
    lives: list[int] = []
    with httpx.stream("POST", f"{stuck_server.api}/v1/chat/completions", json=STREAM, timeout=120) as response:
        watcher = threading.Thread(target=lambda: lives.append(stuck_server.wait_exit(60)))
        watcher.start()
        events: list[Any] = []
        for _, data in sse_events(response):
            events.append(data)
            if is_told_to_stop and len(events) == 10:
                stuck_server.signal(signal.SIGTERM)
    *tokens, last, done = events
    assert len(tokens) > 10
    assert "stands still" in last["error"]["message"]
    assert done == "[DONE]"
    watcher.join(60)
    assert lives == [1]
    assert stuck_server.stderr[-1].startswith("prism-serve: fault: the engine stands still"), "what Kubernetes keeps"
    assert any(" 200 end=" in line for line in stuck_server.stderr), "the request's own line came before"


@pytest.mark.parametrize("is_told_to_stop", [False, True])
def test_an_engine_that_breaks_ends_the_process_with_a_reason_also_while_it_drains(is_told_to_stop: bool) -> None:
    broken = STUCK.replace("threading.Event().wait()", r"raise RuntimeError('out of\nluck')")
    with serving(broken) as server:
        with httpx.stream("POST", f"{server.api}/v1/chat/completions", json=STREAM, timeout=120) as response:
            for number, _ in enumerate(sse_events(response)):
                if is_told_to_stop and number == 10:
                    server.signal(signal.SIGTERM)
        assert server.wait_exit(60) == 1
        assert server.stderr[-1] == "prism-serve: fault: the engine stopped: RuntimeError: out of luck\n"


STREAM = chat_body("Hello", max_tokens=600, ignore_eos=True, stream=True)


def test_a_server_that_has_nothing_to_do_is_not_taken_for_one_that_stands_still() -> None:
    with serving(**{"engine.step_timeout_s": "0.2"}) as server:
        eventually(server.is_idle, 10)
        threading.Event().wait(1.0)
        assert server.http.get(f"{server.api}/livez").status_code == 200
