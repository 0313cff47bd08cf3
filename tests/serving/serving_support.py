"""A real server in a process of its own, and requests to it."""

from __future__ import annotations

import base64
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

SMALL: dict[str, str] = {
    "model.threads": "1",
    "kv.memory_bytes": str(24 << 20),
    "http.host": "127.0.0.1",
    "http.port": "0",
    "http.admin_host": "127.0.0.1",
    "http.admin_port": "0",
}
MAIN = "import sys; from prism_server.serving.cli import main; sys.exit(main(sys.argv[1:]))"
START_TIMEOUT_S = 90.0


class ServerProcess:
    """`prism-serve` on ports of the system's choice. Options are `{"kv.dtype": "bf16"}`; `prelude` is run before it."""

    def __init__(self, prelude: str = "", **options: str) -> None:
        arguments = [f"--{name}={value}" for name, value in (SMALL | options).items()]
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{prelude}\n{MAIN}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.stderr: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=_read_lines, args=(pipe, take), daemon=True)
            for pipe, take in ((self.process.stdout, self._lines.put), (self.process.stderr, self.stderr.append))
        ]
        for reader in self._readers:
            reader.start()
        try:
            line = self._lines.get(timeout=START_TIMEOUT_S)  # prism-serve: api on URL, admin on URL
        except queue.Empty:
            self.process.kill()  # nobody has it yet who could close it
            raise
        self.api, self.admin = (word.rstrip(",\n") for word in line.split() if word.startswith("http://"))
        self.http = httpx.Client(timeout=60.0)

    def wait_ready(self) -> ServerProcess:
        eventually(lambda: self.http.get(f"{self.api}/readyz").status_code == 200, START_TIMEOUT_S)
        return self

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(self.api + path, json=body, **options)

    def chat(self, *parts: Any, **fields: Any) -> httpx.Response:
        """A greedy answer to one user message."""
        return self.post("/v1/chat/completions", chat_body(*parts, **fields))

    def capacity(self) -> dict[str, Any]:
        return self.http.get(f"{self.admin}/internal/capacity").json()

    def metrics(self) -> dict[str, float]:
        """`name{label}` -> value."""
        families = text_string_to_metric_families(self.http.get(f"{self.admin}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        return {
            "".join([sample.name, *map("{{{}}}".format, sample.labels.values())]): sample.value for sample in samples
        }

    def live_pages(self) -> int:
        """Pages that requests refer to."""
        now = self.capacity()
        return int(now["total_pages"] - now["free_pages"] - now["cached_idle_pages"])

    def is_idle(self) -> bool:
        now = self.capacity()
        return not (now["running"] or now["waiting"] or now["inside"] or self.live_pages())

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait_exit(self, timeout_s: float = 60.0) -> int:
        code = self.process.wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return code

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)


@contextmanager
def serving(prelude: str = "", **options: str) -> Iterator[ServerProcess]:
    """A server that is ready."""
    server = ServerProcess(prelude, **options)
    try:
        yield server.wait_ready()
    finally:
        server.close()


def held_at(step: int, until: Path) -> str:
    """A prelude: the device waits before its step of that number, 0 being the first, until the file is there."""
    return f"""
import itertools, pathlib, time
from prism_server.engine import runner
run, steps = runner.Runner.execute, itertools.count()
def run_when_let(self, plan):
    if next(steps) == {step}:
        while not pathlib.Path({str(until)!r}).exists():
            time.sleep(0.01)
    return run(self, plan)
runner.Runner.execute = run_when_let
"""


def _read_lines(pipe: Any, take: Callable[[str], None]) -> None:
    for line in pipe:
        take(line)


def eventually(holds: Callable[[], bool], timeout_s: float, every_s: float = 0.05) -> None:
    """Waits until `holds()`; fails after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        time.sleep(every_s)


def chat_body(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16} | fields


def encoded(picture: Image.Image, fmt: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, fmt, **options)
    return out.getvalue()


def noise(seed: int, width: int = 96, height: int = 96) -> bytes:
    """A picture that no other seed gives."""
    rng = np.random.default_rng(seed)
    return encoded(Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))


def big_picture(shade: int) -> bytes:
    """4K, cheap to make and to send, dear to decode."""
    ramp = Image.linear_gradient("L").resize((3840, 2160))
    return encoded(ramp.point(lambda level: (level + shade) % 256).convert("RGB"), "JPEG")


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), **options}}


def url_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def sse_events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """(event name, data) of an event stream; OpenAI's events have no name and end in `[DONE]`."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield name, data if data == "[DONE]" else json.loads(data)
            name = ""
