"""Real routers and engines in processes of their own, and requests to them."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from prism_server.bench.server_process import ServerProcess

CHAT = "/v1/chat/completions"
LOCAL = {"http.host": "127.0.0.1", "http.port": "0", "http.admin_host": "127.0.0.1", "http.admin_port": "0"}
QUICK = {"cache.poll_ms": "50", "discovery.meeting_s": "1", "placement.slow_start_s": "0.01"}
"""Pods have their whole share at once: with a tenth of it, one request seen a poll too late makes a pod look full."""
SLACK_S = 30.0


def eventually(holds: Callable[[], bool], timeout_s: float = SLACK_S) -> None:
    """Waits until `holds()`; fails after `timeout_s`."""
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {timeout_s} s"
        time.sleep(0.02)


class RouterProcess:
    """`prism-router` on ports of the system's choice; options are `{"cache.poll_ms": "50"}`."""

    def __init__(self, **options: str) -> None:
        arguments = [f"--{name}={value}" for name, value in (LOCAL | QUICK | options).items()]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "prism_server.router.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("PRISM_")},
        )
        assert self.process.stdout is not None
        self.api, self.admin = re.findall(r"http://[^\s,]+", self.process.stdout.readline())
        self.http = httpx.Client(timeout=60.0)

    def post(self, body: Any, path: str = CHAT, **options: Any) -> httpx.Response:
        return self.http.post(self.api + path, json=body, **options)

    def state(self) -> dict[str, Any]:
        """What the router says of itself and of each pod."""
        answer: dict[str, Any] = self.http.get(f"{self.admin}/internal/pods").json()
        return answer

    def pod(self, name: str) -> dict[str, Any]:
        return next(pod for pod in self.state()["pods"] if pod["name"] == name)

    def explain(self, body: Any) -> dict[str, Any]:
        """Its decision for `body`, with every pod's case."""
        answer: dict[str, Any] = self.http.post(f"{self.admin}/debug/placement", json=body).json()
        return answer

    def decision(self, body: Any) -> dict[str, Any]:
        decision: dict[str, Any] = self.explain(body)["decision"]
        return decision

    def has_met(self, count: int) -> bool:
        """Whether that many pods can be given requests, and each has said what it holds."""
        state = self.state()
        accepting = state["stats"]["accepting_pods_now"]
        return bool(accepting == count and all(pod["cache_age_s"] is not None for pod in state["pods"]))

    def metrics(self) -> dict[str, float]:
        """`name{label}` -> value."""
        families = text_string_to_metric_families(self.http.get(f"{self.admin}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        named = {"".join([s.name, *map("{{{}}}".format, s.labels.values())]): s.value for s in samples}
        return {name.removeprefix("prism_router_"): value for name, value in named.items()}

    def is_idle(self) -> bool:
        """Every counter of what is under way is zero."""
        now = self.metrics()
        counters = ("open_requests", "in_flight", "buffered_bytes", "pod_in_flight")
        return not any(value for name, value in now.items() if name.startswith(counters))

    def log(self) -> str:
        """What it has logged so far."""
        file = self._log.fileno()  # read by position: the file's own is where the router writes
        return os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(30)
        self._log.close()


@contextmanager
def routing(*backends: str, **options: str) -> Iterator[RouterProcess]:
    """A router before `api|admin` pods, which it has met."""
    router = RouterProcess(**{"discovery.backends": ",".join(backends)} | options)
    try:
        eventually(lambda: router.has_met(len(backends)))
        yield router
    finally:
        router.close()


def held_port() -> socket.socket:
    """Bound to a port of 127.0.0.1 that the system gives to nobody else while this is open. Who names it can listen
    there, stop, and listen again."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


class Engine(ServerProcess):
    """A real engine on the bundled model. With `ports` it can be started again where it was."""

    def __init__(self, ports: tuple[int, int] = (0, 0), **options: str) -> None:
        small = {"model.threads": "1", "kv.memory_bytes": str(24 << 20), "engine.max_running_sequences": "16"}
        where = {"http.port": str(ports[0]), "http.admin_port": str(ports[1])}
        super().__init__(small | where | options)

    @property
    def backend(self) -> str:
        return f"{self.api_url}|{self.admin_url}"

    @property
    def name(self) -> str:
        """Under which a router with a list of pods knows it."""
        return self.api_url.removeprefix("http://")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def capacity(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.admin_url}/internal/capacity", timeout=60).json()
        return answer

    def is_idle(self) -> bool:
        now = self.capacity()
        live_pages = now["total_pages"] - now["free_pages"] - now["cached_idle_pages"]
        return not (now["running"] or now["waiting"] or now["inside"] or live_pages)


# --- requests


def chat_body(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8} | fields


def picture(seed: int) -> dict[str, Any]:
    """A part with a picture that no other seed gives."""
    rng = np.random.default_rng(seed)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)).save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def bodies_for(router: RouterProcess, name: str) -> Iterator[dict[str, Any]]:
    """Questions about pictures whose home is that pod: of a thousand, since ports decide who is whose home."""
    return (body for body in questions() if router.decision(body)["name"] == name)


def questions() -> Iterator[dict[str, Any]]:
    """About a thousand pictures that no test shows otherwise."""
    return (chat_body(picture(seed), "What is it?") for seed in range(1_000_000, 1_001_000))


def sse_data(text: str) -> list[Any]:
    """The events of a whole stream."""
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


STOP, KILL, TERM = signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM
