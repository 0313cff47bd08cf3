"""A real `prism-serve` in a process of its own, on ports that the system chooses."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx

from prism_server.errors import StartupError
from prism_server.settings_cli import ENV_PREFIX

POLL_S = 0.1
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
MOST_CPU_THREADS = 4
LISTENING = re.compile(r"api on (http://\S+), admin on (http://\S+)")


def cpu_threads() -> int:
    """Threads for the bundled model: half of the cores, because client, event loop and media workers run there too,
    and OpenMP's threads wait for the slowest of them; more than four do not help a model of this size."""
    return max(1, min(MOST_CPU_THREADS, (os.cpu_count() or 1) // 2))


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a server's start is; `done` and `total` are bytes, 0 where the stage has no size."""

    stage: str
    done: int
    total: int
    elapsed_s: float


class ServerProcess:
    """`with ServerProcess({"kv.dtype": "bf16"}) as server:` starts, waits until it is ready, and stops it at the end.

    `PRISM_*` variables do not reach it: what is measured is what `options` say. Raises StartupError with the server's
    own last words if it cannot start.
    """

    def __init__(
        self, options: Mapping[str, str], on_progress: Callable[[StartProgress], None] = lambda _: None
    ) -> None:
        local = {"http.host": "127.0.0.1", "http.port": "0", "http.admin_host": "127.0.0.1", "http.admin_port": "0"}
        self._flags = [f"--{name}={value}" for name, value in (local | dict(options)).items()]
        self._on_progress = on_progress
        self.api_url = ""
        self.admin_url = ""
        self.ready_after_s = 0.0

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        self._log = tempfile.TemporaryFile("w+b")
        command = [sys.executable, "-m", "prism_server.serving.cli", *self._flags]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()
        self._log.close()

    def stop(self) -> int:
        """Drains the server and ends it; its exit code. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        return self._process.wait()

    def log(self) -> str:
        """All that the server has printed."""
        file = self._log.fileno()  # read by position: the file's own is where the server writes
        return os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")

    def _wait_until_ready(self) -> None:
        started_s = time.monotonic()
        while not self._is_ready():
            if self._process.poll() is not None:
                last = (self.log().strip() or "it printed nothing").splitlines()[-1]
                raise StartupError(f"prism-serve ended with code {self._process.returncode}: {last}")
            if time.monotonic() - started_s > START_TIMEOUT_S:
                raise StartupError(f"prism-serve was not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _is_ready(self) -> bool:
        listening = LISTENING.search(self.log())
        if listening is None:
            return False
        self.api_url, self.admin_url = listening.groups()
        try:
            startup = httpx.get(f"{self.api_url}/startupz").json()
            ready = httpx.get(f"{self.api_url}/readyz").is_success
        except httpx.TransportError:  # bound, but not served yet
            return False
        self.ready_after_s = startup["elapsed_s"]
        self._on_progress(StartProgress(startup["stage"], startup["done"], startup["total"], self.ready_after_s))
        return ready
