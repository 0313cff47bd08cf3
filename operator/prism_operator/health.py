"""Whether the operator works: the age of its last resync, and whether its watch still tells it of changes.

A watch can be dead without an error. The resync lists what there is; an object that has been the same in two lists in a
row, and that the watch had all that time to deliver and did not, proves it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prism_operator.queue import Key

MISSES = 2
"""Resyncs in a row that prove it: the first watch may still be on its way."""


class Health:
    """Safe to use from several threads. `longest_s` is how old a sign of life may be."""

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._lock = threading.Lock()
        self._alive_s = clock()
        self._watched: dict[Key, str] = {}
        self._listed: dict[Key, str] = {}
        self._missed: Key | None = None
        self._num_missed = 0

    def beat(self) -> None:
        """A standby has asked for the Lease."""
        with self._lock:
            self._alive_s = self._clock()

    def watched(self, key: Key, version: str | None) -> None:
        """The watch has delivered an object at that resourceVersion; None: its deletion."""
        with self._lock:
            if version is None:
                self._watched.pop(key, None)
            else:
                self._watched[key] = version

    def resynced(self, listed: Mapping[Key, str]) -> None:
        """All objects with their resourceVersions, as a list just found them."""
        with self._lock:
            steady = [key for key, version in listed.items() if self._listed.get(key) == version]
            self._missed = next((key for key in steady if self._watched.get(key) != listed[key]), None)
            self._num_missed = 0 if self._missed is None else self._num_missed + 1
            self._listed = dict(listed)
            self._alive_s = self._clock()

    @property
    def resync_age_s(self) -> float:
        with self._lock:
            return self._clock() - self._alive_s

    def problem(self) -> str:
        """Why it should be restarted; empty when it should not."""
        age_s = self.resync_age_s
        with self._lock:
            if age_s > self._longest_s:
                return f"no resync for {age_s:.0f} s, at most {self._longest_s:.0f} s are allowed"
            if self._missed is not None and self._num_missed >= MISSES:
                return f"the watch is dead: it never told of {self._missed.namespace}/{self._missed.name}"
        return ""


def serve_health(health: Health, port: int) -> ThreadingHTTPServer:
    """`/healthz` on a thread of its own, so that a stuck event loop shows. `/readyz` says the same: a standby is ready,
    else a new operator would wait for ever for the Lease of the one that it replaces."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            problem = health.problem()
            is_known = self.path.split("?")[0] in ("/healthz", "/readyz")
            status = 404 if not is_known else 503 if problem else 200
            content = f"{problem or 'ok'}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Probes are not worth a line."""

    server = ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="healthz", daemon=True).start()
    return server
