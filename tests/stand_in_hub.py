"""A model hub that can be told to misbehave."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
REPOSITORY = "team/model"


@dataclass
class StandInHub:
    """`files` are what it has; the rest is how it behaves. `asked` lists (path, Range, Authorization)."""

    files: dict[str, bytes]
    commit: str = COMMIT
    token: str | None = None
    lists_sizes: bool = True
    lists_digests: bool = True
    cut_after: list[int] = field(default_factory=list)
    """Bytes after which the next transfers of weights break off, one entry each."""
    stall: bool = False
    ignores_range: bool = False
    sends_instead: dict[str, bytes] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    """Answers of the next requests, before it behaves."""
    store: str = ""
    """Host of a file store that it redirects weights to."""
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    url: str = ""

    def file_requests(self) -> list[str]:
        return [path for path, _, _ in self.asked if "/resolve/" in path or path.startswith("/store/")]

    def listing(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            entry: dict[str, Any] = {"rfilename": name}
            if self.lists_sizes:
                entry["size"] = len(content)
            if self.lists_digests and name.endswith(".safetensors"):
                entry["lfs"] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            siblings.append(entry)
        return {"sha": self.commit, "siblings": siblings}


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    released: threading.Event

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        authorization = self.headers.get("Authorization")
        self.hub.asked.append((path, self.headers.get("Range"), authorization))
        if self.hub.statuses:
            return self._answer(self.hub.statuses.pop(0), b"")
        if self.hub.token is not None and authorization != f"Bearer {self.hub.token}" and "/store/" not in path:
            return self._answer(401, b"")
        if re.fullmatch(rf"/api/models/{REPOSITORY}/revision/(main|v/2)", path):
            return self._answer(200, json.dumps(self.hub.listing()).encode())
        found = re.fullmatch(rf"(?:/{REPOSITORY}/resolve/{self.hub.commit}|/store)/(.+)", path)
        if found is None or found[1] not in self.hub.files:
            return self._answer(404, b"")
        return self._file(found[1], is_store=path.startswith("/store/"))

    def _file(self, name: str, is_store: bool) -> None:
        content = self.hub.files[name]
        digest = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
        is_weights = name.endswith(".safetensors")
        if is_weights and self.hub.store and not is_store:
            return self._answer(302, b"", {"Location": f"{self.hub.store}/store/{name}", **digest})
        if is_weights and self.hub.stall:
            self.released.wait(30)
        sent = self.hub.sends_instead.get(name, content)
        headers = {"ETag": '"' + "0" * 64 + '"'} if is_store else digest if is_weights else {}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted is None or self.hub.ignores_range:
            return self._answer(200, sent, headers, is_weights)
        start = int(wanted[1])
        if start >= len(sent):
            return self._answer(416, b"")
        span = {"Content-Range": f"bytes {start}-{len(sent) - 1}/{len(sent)}"}
        return self._answer(206, sent[start:], headers | span, is_weights)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, may_break: bool = False) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if may_break and self.hub.cut_after:
            self.wfile.write(body[: self.hub.cut_after.pop(0)])
            self.close_connection = True
            return
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def serving(hub: StandInHub, host: str = "127.0.0.1") -> Iterator[StandInHub]:
    released = threading.Event()
    handler = type("Handler", (_Handler,), {"hub": hub, "released": released})
    server = ThreadingHTTPServer((host, 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://{host}:{server.server_port}"
    try:
        yield hub
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()
