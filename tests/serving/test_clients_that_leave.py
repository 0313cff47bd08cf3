"""A client that goes away frees its pages within one second, in every phase (asserted with tenfold slack)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from serving_support import ServerProcess, big_picture, chat_body, eventually, image_part, noise, serving

SLACK_S = 10.0
SETUP_S = 60.0
LONG = 3000
PATIENT = """
import time
from prism_server.engine.runner import Runner
from prism_server.media.kinds import ImageKind
prepare, execute = ImageKind.prepare, Runner.execute
def prepare_when_nobody_waits(self, item, facts, is_wanted):
    end_s = time.monotonic() + 60
    while facts.num_tokens > 1000 and is_wanted() and time.monotonic() < end_s:
        time.sleep(0.01)
    return prepare(self, item, facts, is_wanted)
def execute_slowly_if_far_on(self, plan):
    if any(rows.count > 1 and rows.start > 200 for rows in plan.sequences):
        time.sleep(0.05)
    return execute(self, plan)
ImageKind.prepare, Runner.execute = prepare_when_nobody_waits, execute_slowly_if_far_on
"""
"""Large pictures are being prepared for as long as somebody wants them; long prompts take half a minute."""


@pytest.fixture(scope="module")
def own_server() -> Iterator[ServerProcess]:
    options = {"engine.max_running_sequences": "2", "engine.max_step_tokens": "8", "media.workers": "12"}
    with serving(PATIENT, **options) as server:  # a worker for each picture that waits, and some for what else comes
        yield server


class Client:
    """A raw connection: sends a request and hangs up without a word."""

    def __init__(self, server: ServerProcess, body: dict[str, Any], path: str = "/v1/chat/completions") -> None:
        at = urlsplit(server.api)
        payload = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
        self.request = head + payload
        self.socket = socket.create_connection((at.hostname, at.port), timeout=30)

    def send(self, share: float = 1.0) -> Client:
        self.socket.sendall(self.request[: int(len(self.request) * share)])
        return self

    def wait_for(self, text: bytes) -> None:
        seen = b""
        while text not in seen:
            received = self.socket.recv(65536)
            assert received, seen
            seen += received

    def leave(self) -> None:
        self.socket.close()


def long_body(seed: int, **fields: Any) -> dict[str, Any]:
    return chat_body("Hello", image_part(noise(seed)), max_tokens=LONG, ignore_eos=True, **fields)


def cancels(server: ServerProcess) -> float:
    return server.metrics()["prism_cancels_total"]


@pytest.mark.parametrize("stream", [True, False])
def test_decoding(own_server: ServerProcess, stream: bool) -> None:
    client = Client(own_server, long_body(1, stream=stream)).send()
    if stream:
        client.wait_for(b'"content":"')
    else:
        eventually(lambda: own_server.live_pages() > 0, SETUP_S)
    before = cancels(own_server)
    client.leave()
    eventually(own_server.is_idle, SLACK_S)
    assert cancels(own_server) == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_queued(own_server: ServerProcess, stream: bool) -> None:
    running = [Client(own_server, long_body(i, stream=True)).send() for i in (2, 3)]
    for client in running:
        client.wait_for(b'"content":"')
    queued = [Client(own_server, long_body(10 + i, stream=stream)).send() for i in range(5)]
    eventually(lambda: own_server.capacity()["waiting"] == 5, SETUP_S)
    for client in queued:
        client.leave()
    eventually(lambda: own_server.capacity()["waiting"] == 0 and own_server.capacity()["inside"] == 2, SLACK_S)
    for client in running:
        client.leave()
    eventually(own_server.is_idle, SLACK_S)


def test_prefilling(own_server: ServerProcess) -> None:
    before = own_server.metrics()
    body = chat_body("word " * 2000, max_tokens=4, stream=True)  # 6,000 tokens, 8 a step
    client = Client(own_server, body).send()
    prefilled = "prism_engine_prefilled_tokens_total"
    eventually(lambda: own_server.metrics()[prefilled] > before[prefilled], SETUP_S)
    client.leave()
    eventually(own_server.is_idle, SLACK_S)
    generated = "prism_engine_generated_tokens_total"
    assert own_server.metrics()[generated] == before[generated]


def test_preparing(own_server: ServerProcess) -> None:
    pictures = [image_part(big_picture(shade)) for shade in range(0, 240, 30)]
    clients = [Client(own_server, chat_body(*pictures, f"question {i}", max_tokens=LONG)).send() for i in range(2)]
    eventually(lambda: own_server.metrics()["prism_media_cache_in_flight"] > 0, SETUP_S, every_s=0.01)
    for client in clients:
        client.leave()
    eventually(own_server.is_idle, SLACK_S)
    eventually(lambda: own_server.metrics()["prism_media_cache_in_flight"] == 0, SLACK_S)


def test_half_way_through_the_body(own_server: ServerProcess) -> None:
    client = Client(own_server, long_body(4)).send(0.5)
    eventually(lambda: own_server.capacity()["inside"] == 1, SETUP_S)
    client.leave()
    eventually(own_server.is_idle, SLACK_S)


def test_the_next_request_is_answered_after_any_mix_of_leaving(own_server: ServerProcess) -> None:
    def come_and_go(i: int) -> None:
        client = Client(own_server, long_body(200 + i % 3, stream=bool(i % 2))).send(1.0 if i % 5 else 0.3)
        threading.Event().wait(i % 7 / 20)
        client.leave()

    threads = [threading.Thread(target=come_and_go, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(own_server.is_idle, SLACK_S)
    assert own_server.chat("Hello", max_tokens=3).status_code == 200
