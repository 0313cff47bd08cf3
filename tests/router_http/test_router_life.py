"""The router's first second and its last: readiness, start-up errors, the drain."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from router_http_support import CHAT, TERM, RouterProcess, chat_body, eventually, routing, sse_data
from scripted_pods import Asked, never, says_yes, scripted, send_chunk, start_events

STREAM = chat_body("Hello", stream=True)


async def counts(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """A stream of a second, or an endless one."""
    await start_events(writer)
    for n in range(1_000_000 if b"endless" in asked.body else 20):
        await send_chunk(writer, b'data: {"n": %d}\n\n' % n)
        await asyncio.sleep(0.05)
    await send_chunk(writer, b"data: [DONE]\n\n")
    await send_chunk(writer, b"")


class Reader:
    """A stream that is read in a thread."""

    def __init__(self, router: RouterProcess, body: dict[str, Any]) -> None:
        self.text = ""
        self._router, self._body = router, body
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        eventually(lambda: "data:" in self.text)

    def _read(self) -> None:
        with httpx.stream("POST", self._router.api + CHAT, json=self._body, timeout=60) as answer:
            for piece in answer.iter_text():
                self.text += piece

    def finish(self) -> list[Any]:
        self._thread.join(60)
        return sse_data(self.text)


def test_sigterm_is_not_ready_yet_open_then_closed_and_streams_run_on() -> None:
    with scripted(counts) as (pod,), routing(pod.backend, **{"http.drain_propagation_s": "5"}) as router:
        running = Reader(router, STREAM)
        router.process.send_signal(TERM)
        eventually(lambda: router.http.get(f"{router.api}/readyz").status_code == 503)
        pod.script = says_yes
        late = router.post(chat_body("Hello"))
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        pod.script = counts
        last = Reader(router, STREAM)
        assert [data for data in running.finish() if data != "[DONE]"] == [{"n": n} for n in range(20)]
        assert last.finish()[-1] == "[DONE]"
        assert router.process.wait(30) == 0


def test_when_the_propagation_is_over_nobody_new_comes_in_while_streams_run() -> None:
    may_end = threading.Event()

    async def counts_on(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await start_events(writer)
        while not may_end.is_set():
            await send_chunk(writer, b'data: {"n": 1}\n\n')
            await asyncio.sleep(0.05)
        await send_chunk(writer, b"data: [DONE]\n\n")
        await send_chunk(writer, b"")

    with scripted(counts_on) as (pod,), routing(pod.backend) as router:
        running = Reader(router, STREAM)
        router.process.send_signal(TERM)

        def is_closed() -> bool:
            try:
                return httpx.get(f"{router.api}/livez", timeout=60).status_code != 200
            except httpx.TransportError:
                return True

        eventually(is_closed)
        assert httpx.get(f"{router.admin}/livez", timeout=60).status_code == 200
        may_end.set()
        assert running.finish()[-1] == "[DONE]"
        assert router.process.wait(30) == 0


def test_streams_that_outlast_the_drain_end_in_an_error_event() -> None:
    with scripted(counts) as (pod,), routing(pod.backend, **{"http.drain_timeout_s": "0.3"}) as router:
        running = Reader(router, chat_body("endless", stream=True))
        router.process.send_signal(TERM)
        *_, error, done = running.finish()
        assert (error["error"]["code"], done) == ("shutting_down", "[DONE]")
        assert router.process.wait(30) == 0
        assert "Traceback" not in router.log()


def test_a_request_that_still_waits_at_the_drains_end_is_503_shutting_down() -> None:
    with scripted(never) as (pod,), routing(pod.backend, **{"http.drain_timeout_s": "0.3"}) as router:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(router.post(STREAM)))
        asking.start()
        eventually(lambda: len(pod.asked) == 1)
        router.process.send_signal(TERM)
        asking.join(30)
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in answers[0].headers
        assert router.process.wait(30) == 0


def test_a_request_whose_body_is_still_coming_at_the_drains_end_is_503_shutting_down() -> None:
    with scripted(says_yes) as (pod,), routing(pod.backend, **{"http.drain_timeout_s": "0.3"}) as router:
        url = urlsplit(router.api)
        with socket.create_connection((url.hostname, url.port), timeout=60) as client:
            client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf".encode())
            eventually(lambda: router.metrics()["open_requests"] == 1)
            router.process.send_signal(TERM)
            said = b"".join(iter(lambda: client.recv(1 << 16), b""))
            assert said.startswith(b"HTTP/1.1 503 ")
            assert b'"code":"shutting_down"' in said
        assert router.process.wait(30) == 0
        assert "Traceback" not in router.log()


def test_a_router_waits_a_moment_for_its_pods_before_it_is_ready() -> None:
    with scripted(says_yes) as (pod,):
        pod.poll_script = never
        options = {"discovery.meeting_s": "600", "cache.poll_timeout_s": "0.5"}
        router = RouterProcess(**{"discovery.backends": pod.backend} | options)
        try:
            assert router.http.get(f"{router.api}/livez").status_code == 200
            assert router.http.get(f"{router.api}/readyz").json() == {"ready": False, "phase": "starting"}
            pod.poll_script = pod.tells_cache
            eventually(lambda: router.http.get(f"{router.api}/readyz").status_code == 200)
        finally:
            router.close()


def test_internal_paths_ask_for_the_token_that_pods_are_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with scripted(says_yes) as (pod,):
        router = RouterProcess(**{"discovery.backends": pod.backend, "http.admin_token_file": str(token)})
        try:
            url = f"{router.admin}/internal/pods"
            refused = httpx.get(url)
            assert (refused.status_code, refused.headers.get("www-authenticate")) == (401, "Bearer")
            known = httpx.get(url, headers={"authorization": "Bearer secret"}).json()
            assert [entry["name"] for entry in known["pods"]] == [pod.name]
            assert httpx.get(f"{router.admin}/metrics").status_code == 200
            eventually(lambda: pod.poll_headers.get("authorization") == "Bearer secret")
            token.write_text("newer\nsecret\n")
            eventually(lambda: pod.poll_headers.get("authorization") == "Bearer newer")
            token.unlink()  # the last good ones stay
            for valid in ("newer", "secret"):
                assert httpx.get(url, headers={"authorization": f"Bearer {valid}"}).status_code == 200
            assert httpx.get(url, headers={"authorization": "Bearer other"}).status_code == 401
            assert pod.poll_headers.get("authorization") == "Bearer newer"
        finally:
            router.close()


def refused_start(*arguments: str) -> str:
    """The one line on stderr of a router that cannot start; its exit code is 2."""
    command = [sys.executable, "-m", "prism_server.router.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_what_cannot_start_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("# nothing\n")
    assert "holds no key" in refused_start("--backends=http://a", f"--http.admin_token_file={token}")
    assert "exactly one of discovery.backends" in refused_start()
    assert "http.admin_port: cannot listen" in refused_start(
        "--backends=http://a", "--http.port=0", "--http.admin_host=198.51.100.1"
    )
