"""The page's files in memory, as an ASGI application without a framework: the router has none."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from prism_server.http.asgi import Receive, Scope, Send, header

FILES = Path(__file__).parent / "files"
PREFIX = "/page/"
"""Where everything but the page itself lies. The page names its files relative to itself, so that a proxy may serve it
under a path of its own."""

TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".json": b"application/json",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".gif": b"image/gif",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy: own files only, nothing inline; `blob:` is what the user has dropped."""
SECURITY = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
CACHING = (b"cache-control", b"no-cache")
"""Kept, but asked about each time: all files are always those of one version."""


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is sent."""

    content_type: bytes
    etag: bytes
    body: bytes = field(repr=False)

    @classmethod
    def read(cls, file: Path) -> Asset:
        body = file.read_bytes()
        return cls(TYPES[file.suffix], b'"%s"' % hashlib.sha256(body).hexdigest()[:32].encode(), body)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"content-type", self.content_type), (b"etag", self.etag), CACHING, *SECURITY]


class Site:
    """An ASGI application for the paths in `paths`, GET and HEAD."""

    def __init__(self, files: Path = FILES) -> None:
        found = sorted(file for file in files.rglob("*") if file.is_file() and not file.name.startswith("."))
        self._assets = {_path(file.relative_to(files).as_posix()): Asset.read(file) for file in found}

    @property
    def paths(self) -> Iterable[str]:
        return self._assets.keys()

    def __contains__(self, path: str) -> bool:
        return path in self._assets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers for a path that is here: the file, or 304 to a client that has it."""
        asset = self._assets[scope["path"]]
        given = header(scope, b"if-none-match") or b""
        has_it = asset.etag in given or given == b"*"
        body = b"" if has_it or scope["method"] == "HEAD" else asset.body
        length = [] if has_it else [(b"content-length", str(len(asset.body)).encode())]
        status = 304 if has_it else 200
        await send({"type": "http.response.start", "status": status, "headers": [*asset.headers, *length]})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _path(name: str) -> str:
    return "/" if name == "index.html" else PREFIX + name
