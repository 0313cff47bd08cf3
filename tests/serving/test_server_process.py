"""The process: its first second, its start-up errors, its keys, its end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import torch
from serving_support import ServerProcess, chat_body, eventually, held_at, serving, sse_events, url_part

from prism_server.demo_model import checkpoint_dir

STREAM = chat_body("Hello", max_tokens=60, ignore_eos=True, stream=True)
HOLD_LOADING = """
import asyncio, pathlib
from prism_server.serving import server
load = server._load
def load_when_let(services):
    async def loaded():
        while not pathlib.Path({!r}).exists():
            await asyncio.sleep(0.01)
        return await load(services)
    return asyncio.ensure_future(loaded())
server._load = load_when_let
"""
"""The model is loaded once the file is there."""
SLOW_STEPS = """
import time
from prism_server.engine import runner
execute = runner.Runner.execute
def execute_slowly(self, plan):
    time.sleep(0.01)
    return execute(self, plan)
runner.Runner.execute = execute_slowly
"""


@pytest.fixture
def process() -> Iterator[list[ServerProcess]]:
    """Processes to close at the end."""
    started: list[ServerProcess] = []
    yield started
    for server in started:
        server.close()


def test_the_port_answers_livez_from_the_first_second_and_readyz_only_when_the_model_can_answer(
    process: list[ServerProcess], tmp_path: Path
) -> None:
    server = ServerProcess(HOLD_LOADING.format(str(tmp_path / "load")))
    process.append(server)
    assert server.http.get(f"{server.api}/livez").status_code == 200
    assert time.monotonic() - server.started_s < 10  # a second, with tenfold slack
    assert server.http.get(f"{server.api}/readyz").status_code == 503
    assert server.http.get(f"{server.api}/startupz").status_code == 503
    refused = server.chat("Hello")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    (tmp_path / "load").touch()
    server.wait_ready()
    assert server.http.get(f"{server.api}/startupz").status_code == 200
    assert server.chat("Hello", max_tokens=2).status_code == 200


def test_stopping_while_the_model_is_being_loaded_is_an_orderly_end(process: list[ServerProcess]) -> None:
    server = ServerProcess()
    process.append(server)
    server.signal()
    assert server.wait_exit() == 0


class Stream:
    """A stream that is read in a thread."""

    def __init__(self, server: ServerProcess, body: dict[str, Any] = STREAM) -> None:
        self.events: list[Any] = []
        self._url, self._body = f"{server.api}/v1/chat/completions", body
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        eventually(lambda: len(self.events) > 3, 60)

    def _read(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=120) as response:
            for _, data in sse_events(response):
                self.events.append(data)

    def finish(self) -> list[Any]:
        self._thread.join(120)
        return self.events


def readiness(server: ServerProcess) -> tuple[int, str]:
    answer = server.http.get(f"{server.api}/readyz")
    return answer.status_code, answer.json()["phase"]


def test_sigterm_drains_running_streams_finish_new_requests_get_503_and_the_exit_code_is_0(tmp_path: Path) -> None:
    with serving(held_at(30, tmp_path / "go on"), **{"http.drain_timeout_s": "3600"}) as server:
        stream = Stream(server)
        server.signal(signal.SIGTERM)
        eventually(lambda: readiness(server) == (503, "draining"), 10)
        assert server.http.get(f"{server.api}/livez").status_code == 200
        refused = server.chat("Hello")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        (tmp_path / "go on").touch()
        *_, last, done = stream.finish()
        assert last["choices"][0]["finish_reason"] == "length"
        assert done == "[DONE]"
        assert server.wait_exit() == 0


def test_a_server_that_is_about_to_drain_is_not_ready_but_serves_those_who_have_not_heard_of_it() -> None:
    with serving(**{"http.drain_propagation_s": "3600"}) as server:
        server.signal(signal.SIGTERM)
        eventually(lambda: readiness(server) == (503, "leaving"), 10)
        late = server.chat("Hello")
        assert late.status_code == 200
        assert late.headers["connection"] == "close"
        server.signal(signal.SIGTERM)  # a second one asks to hurry
        assert server.wait_exit() == 0


def test_streams_that_outlast_the_drain_end_in_an_error_event() -> None:
    with serving(SLOW_STEPS, **{"http.drain_propagation_s": "0.1", "http.drain_timeout_s": "0.5"}) as server:
        stream = Stream(server, STREAM | {"max_tokens": 6000})
        assert server.http.post(f"{server.admin}/internal/drain").status_code == 202
        *_, last, done = stream.finish()
        assert last["error"]["code"] == "shutting_down"
        assert done == "[DONE]"
        assert server.wait_exit() == 0


def test_a_request_whose_body_is_still_coming_at_the_drains_end_is_503_shutting_down() -> None:
    with serving(**{"http.drain_timeout_s": "0.3"}) as server:
        url = urlsplit(server.api)
        with socket.create_connection((url.hostname, url.port), timeout=60) as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf")
            eventually(lambda: server.capacity()["inside"] == 1, 10)
            server.signal(signal.SIGTERM)
            said = b"".join(iter(lambda: client.recv(1 << 16), b""))
        head, body = said.split(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nretry-after: 1\r\n" in head
        assert json.loads(body)["error"]["code"] == "shutting_down"
        assert server.wait_exit() == 0
        assert "Traceback" not in "".join(server.stderr)


def test_a_request_that_is_still_being_prepared_at_the_drains_end_is_503_shutting_down() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # a site that takes connections and says nothing
        port = silent.getsockname()[1]
        fetching = {
            "fetch.hosts": "127.0.0.1",
            "fetch.allow_http": "true",
            "fetch.ports": str(port),
            "fetch.private_networks": "127.0.0.0/8",
        }
        with serving(**fetching, **{"http.drain_timeout_s": "0.3"}) as server:
            answers: list[httpx.Response] = []
            link = url_part(f"http://127.0.0.1:{port}/a.png")
            asking = threading.Thread(target=lambda: answers.append(server.chat(link)))
            asking.start()
            connection, _ = silent.accept()
            with connection:
                server.signal(signal.SIGTERM)
                asking.join(60)
            assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
            assert server.wait_exit() == 0
            assert "Traceback" not in "".join(server.stderr)


def test_a_fault_of_the_engine_ends_the_process_at_once_and_says_why() -> None:
    """The device breaks at the thirtieth step: streams get an error event, the exit code is 1."""
    prelude = """
from prism_server.engine import runner
launch, steps = runner.Runner.launch, iter(range(30))
def breaking_launch(self, plan):
    if next(steps, None) is None:
        raise RuntimeError("the device is lost")
    return launch(self, plan)
runner.Runner.launch = breaking_launch
"""
    with serving(prelude) as server:
        *_, last, done = Stream(server).finish()
        assert "the device is lost" in last["error"]["message"]
        assert done == "[DONE]"
        assert server.wait_exit(10) == 1
        assert any("prism-serve: fault:" in line and "the device is lost" in line for line in server.stderr)


def test_a_deadline_ends_an_answer_with_what_there_is_and_refuses_what_never_began() -> None:
    options = {"http.request_timeout_s": "2", "engine.max_running_sequences": "4", "engine.max_step_tokens": "4"}
    with serving(SLOW_STEPS, **options) as server:
        *_, last, done = Stream(server, STREAM | {"max_tokens": 7000}).finish()
        assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("length", "deadline")
        assert done == "[DONE]"
        late = server.chat("word " * 2500)  # 7,500 tokens: nearly two thousand steps of prefill
        assert (late.status_code, late.json()["error"]["code"]) == (503, "deadline_exceeded")
        eventually(server.is_idle, 10)


def test_a_body_above_the_cap_is_413_with_and_without_a_declared_length() -> None:
    with serving(**{"http.max_body_bytes": "100000"}) as server:
        large = json.dumps(chat_body("x" * 100_000)).encode()
        declared = server.http.post(f"{server.api}/v1/chat/completions", content=large)
        chunked = server.http.post(f"{server.api}/v1/chat/completions", content=iter([large[:50_000], large[50_000:]]))
        assert [declared.status_code, chunked.status_code] == [413, 413]
        assert declared.json()["error"]["code"] == "body_too_large"
        assert server.chat("Hello", max_tokens=1).status_code == 200


def test_api_keys_rotate_without_a_restart_and_without_a_401_in_between(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n")

    def status(key: str) -> int:
        return server.http.get(f"{server.api}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    with serving(**{"http.api_keys_file": str(keys)}) as server:
        assert [status("first"), status("second")] == [200, 401]
        keys.write_text("first\nsecond\n")
        assert [status("first"), status("second")] == [200, 200]
        keys.write_text("second\n")
        assert [status("first"), status("second")] == [200, 200]


def changed_checkpoint(directory: Path, **config: Any) -> str:
    """The demo checkpoint with another config.json."""
    for path in checkpoint_dir().iterdir():
        (directory / path.name).symlink_to(path)
    original = json.loads((checkpoint_dir() / "config.json").read_text())
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(original | config))
    return str(directory)


def refused_start(*arguments: str, **options: str) -> str:
    """The one line that says why a server cannot start; its exit code is 2."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "prism_server.serving.cli", "--http.port=0", "--http.admin_port=0"]
    done = subprocess.run([*command, *arguments, *flags], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("prism-serve: error: "))
    return line


def test_a_bad_config_key_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"kv": {"dtyp": "fp8"}}')
    assert "dtyp" in refused_start("--config", str(config))


def test_a_missing_file_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    assert missing in refused_start("--config", missing)
    assert missing in refused_start(**{"model.path": missing})
    assert missing in refused_start(**{"http.api_keys_file": missing})


@pytest.mark.parametrize("option", ["kv.memory_bytes", "kv.host_bytes"])
def test_memory_that_is_not_there_is_one_clear_line_and_exit_code_2(option: str) -> None:
    assert option in refused_start(**{option: str(1 << 50)})


def test_a_missing_weight_file_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    directory = changed_checkpoint(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused_start(**{"model.path": directory})


def test_a_wrong_dtype_is_one_clear_line_and_exit_code_2() -> None:
    assert "int3" in refused_start(**{"kv.dtype": "int3"})
    assert "float7" in refused_start(**{"model.dtype": "float7"})


def test_another_architecture_is_one_clear_line_and_exit_code_2(tmp_path: Path) -> None:
    directory = changed_checkpoint(tmp_path, architectures=["LlamaForCausalLM"], model_type="llama")
    assert "llama" in refused_start(**{"model.path": directory}).lower()


def test_a_device_that_is_not_there_is_one_clear_line_and_exit_code_2() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "cuda" in refused_start(**{"model.device": "cuda"}).lower()


def test_a_port_in_use_is_one_clear_line_and_exit_code_2(server: ServerProcess) -> None:
    port = server.api.rsplit(":", 1)[1]
    assert port in refused_start(**{"http.host": "127.0.0.1", "http.port": port})
