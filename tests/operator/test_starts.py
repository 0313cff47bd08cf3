"""Whether a start that stands still is seen, and what engines say of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from prism_operator.admin_client import Start, read_starts
from prism_operator.pods import Pod, Trouble
from prism_operator.starts import Starts

POD = Pod("e-0", "u0", "r1", 0, ip="127.0.0.1")
OTHER = Pod("e-1", "u1", "r1", 1, ip="127.0.0.1")


class Engines:
    """Pods by UID, a clock, and what was asked."""

    def __init__(self, **bytes_done: int) -> None:
        self.now_s = 0.0
        self.bytes_done = bytes_done
        self.started: set[str] = set()
        self.asked = 0
        self.starts = Starts(self.read, lambda: self.now_s)

    def read(self, pods: Sequence[Pod]) -> list[Start]:
        self.asked += 1
        return [
            Start(pod.uid, pod.uid in self.started, "loading weights", self.bytes_done[pod.uid], 9000)
            for pod in pods
            if pod.uid in self.bytes_done
        ]

    def judged(self, now_s: float, *pods: Pod, stall_s: float = 40.0) -> list[Trouble | None]:
        self.now_s = now_s
        return [pod.trouble for pod in self.starts.judged(pods or (POD,), stall_s)]


def test_a_start_that_stands_still_is_said_and_one_that_moves_is_not() -> None:
    engines = Engines(u0=1000, u1=0)
    stalled = Trouble("StartStalled", "loading weights, 1,000 of 9,000 bytes: nothing has moved for 40 s")
    for now_s in (0.0, 20.0, 39.0):
        engines.bytes_done["u1"] += 1
        assert engines.judged(now_s, POD, OTHER) == [None, None]
    engines.bytes_done["u1"] += 1
    assert engines.judged(50.0, POD, OTHER) == [stalled, None]
    engines.bytes_done["u0"] += 1
    assert engines.judged(61.0, POD, OTHER) == [None, None]


def test_pods_are_looked_at_some_times_within_the_patience_and_only_while_they_start() -> None:
    engines = Engines(u0=0)
    engines.judged(0.0)
    assert engines.starts.retry_s == 10.0
    engines.judged(4.0)
    assert (engines.asked, engines.starts.retry_s) == (1, 6.0)
    engines.judged(10.0)
    assert engines.asked == 2
    ready = Pod("e-0", "u0", "r1", 0, ip="127.0.0.1", is_ready=True)
    engines.judged(30.0, ready)
    assert (engines.asked, engines.starts.retry_s) == (2, None)


@pytest.mark.parametrize(
    "pod",
    [
        Pod("e-9", "u9", "r1", 9, ip="127.0.0.1"),
        Pod("e-0", "u0", "r1", 0),
        Pod("e-0", "u0", "r1", 0, ip="127.0.0.1", is_terminating=True),
    ],
    ids=["silent", "without an address", "leaving"],
)
def test_a_pod_that_does_not_answer_is_not_judged(pod: Pod) -> None:
    engines = Engines(u0=0)
    assert [engines.judged(now_s, pod) for now_s in (0.0, 50.0, 100.0)] == [[None]] * 3


def test_an_engine_that_has_started_and_is_not_ready_does_not_stall() -> None:
    engines = Engines(u0=9000)
    engines.started.add("u0")
    assert [engines.judged(now_s) for now_s in (0.0, 50.0, 100.0)] == [[None]] * 3


def test_a_pod_in_trouble_keeps_its_own_words() -> None:
    engines = Engines(u0=0)
    crashed = Pod("e-0", "u0", "r1", 0, ip="127.0.0.1", trouble=Trouble("Error", "out of memory"))
    engines.judged(0.0)
    assert engines.judged(50.0, crashed) == [crashed.trouble]


class StartingEngine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = {"started": False, "stage": "loading weights", "done": 5, "total": 9, "elapsed_s": 1.5}
        content = json.dumps(body).encode() if self.path == "/startupz" else b"[]"
        self.send_response(503)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def port(patient_reads: None) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), StartingEngine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_an_engine_that_starts_tells_how_far_it_is(port: int) -> None:
    nowhere = Pod("e-1", "u1", "r1", 1, ip="127.0.0.2")
    not_yet = Pod("e-2", "u2", "r1", 2)
    assert read_starts([nowhere, POD, not_yet], port) == [Start("u0", False, "loading weights", 5, 9)]
