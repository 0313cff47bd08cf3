"""A model hub over HTTP, with the standard library alone: list a revision's files, read one from some byte on."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPMessage
from typing import IO, Any

_SHA256 = re.compile(r'(?:W/)?"?([0-9a-f]{64})"?')
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
LINKED_HEADERS = ("X-Linked-Etag", "X-Linked-Size")
"""On the hub's redirect, not on the store's answer that it leads to."""


class LoadFailed(Exception):
    """`reason` becomes a condition's reason and has an exit code of its own; `retry` where another try may help."""

    def __init__(self, reason: str, message: str, retry: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry = retry


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the listing has it; size and digest where it says them."""

    name: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Revision:
    commit: str
    files: tuple[HubFile, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """An open answer: bytes from `start` on; `size` and `sha256` of the whole file where the headers say them."""

    start: int
    size: int | None
    sha256: str | None
    chunks: Iterator[bytes]


class RangeRefused(LoadFailed):
    """The hub cannot go on from that byte: the file has to come from its start."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to other hosts without the token, and keeps what the hub says about the file on the way."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is None:
            return None
        if urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:
            following.remove_header("Authorization")
        linked = req.linked  # type: ignore[attr-defined]
        linked.update({name: headers[name] for name in LINKED_HEADERS if name in headers})
        following.linked = linked  # type: ignore[attr-defined]
        return following


class Hub:
    """`token` is sent to the endpoint's own host only. `timeout_s` is for each connect and each read."""

    chunk_bytes = 1 << 20

    def __init__(self, endpoint: str, repository: str, token: str | None, timeout_s: float) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._repository = repository
        self._token = token
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_Redirects)

    def revision(self, name: str) -> Revision:
        """The commit that `name` stands for now, and its files."""
        url = f"{self._endpoint}/api/models/{self._repository}/revision/{_quoted(name)}?blobs=true"
        try:
            with closing(self._open(url, {}, {})) as answer:
                content = json.load(answer)
            files = tuple(_hub_file(entry) for entry in content["siblings"])
            return Revision(str(content["sha"]), files)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise LoadFailed("HubUnavailable", f"{url} answers with no list of files", retry=True) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(url, error) from None

    def read(self, commit: str, name: str, start: int) -> Transfer:
        """Opens a file from byte `start`; a hub that cannot resume sends it from 0."""
        url = f"{self._endpoint}/{self._repository}/resolve/{_quoted(commit)}/{urllib.parse.quote(name)}"
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        linked: dict[str, str] = {}
        answer = self._open(url, headers, linked)
        first, size = _span(answer.status, answer.headers)
        linked_size = linked.get("X-Linked-Size") or answer.headers.get("X-Linked-Size", "")
        return Transfer(
            start=first,
            size=int(linked_size) if linked_size.isdigit() else size,
            sha256=self._digest(answer, linked),
            chunks=self._chunks(url, answer),
        )

    def _digest(self, answer: Any, linked: Mapping[str, str]) -> str | None:
        """The SHA-256 that the hub gives as the entity tag of a large file. A tag of the store behind it counts for
        nothing: stores have digests of their own."""
        said = [linked.get("X-Linked-Etag"), answer.headers.get("X-Linked-Etag")]
        if answer.url.startswith(f"{self._endpoint}/"):
            said.append(answer.headers.get("ETag"))
        found = next(filter(None, (_SHA256.fullmatch(tag or "") for tag in said)), None)
        return found[1] if found else None

    def _chunks(self, url: str, answer: Any) -> Iterator[bytes]:
        with closing(answer):
            try:
                while chunk := answer.read(self.chunk_bytes):
                    yield chunk
            except (OSError, http.client.HTTPException) as error:
                raise self._broken(url, error) from None

    def _open(self, url: str, headers: Mapping[str, str], linked: dict[str, str]) -> Any:
        """The last answer; `linked` takes the headers of that kind from the redirects before it. Raises LoadFailed."""
        request = urllib.request.Request(url, headers=dict(headers))
        request.linked = linked  # type: ignore[attr-defined]
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            return self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with closing(error):
                raise self._refused(url, error.code) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(url, error) from None

    def _refused(self, url: str, status: int) -> LoadFailed:
        if status in (401, 403):
            what = "does the token read it?" if self._token else "it needs a token, or there is no such repository"
            return LoadFailed("Unauthorized", f"{url} answers {status} for {self._repository}: {what}")
        if status == 404:
            return LoadFailed("NotFound", f"{url} answers 404: no such repository, revision or file")
        if status == 416:
            return RangeRefused("BrokenTransfer", f"{url} answers 416: it cannot be resumed", retry=True)
        return LoadFailed("HubUnavailable", f"{url} answers {status}", retry=status == 429 or status >= 500)

    def _broken(self, url: str, error: Exception) -> LoadFailed:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return LoadFailed("Timeout", f"{url}: nothing moved for {self._timeout_s:g} s", retry=True)
        if isinstance(error, urllib.error.URLError):
            return LoadFailed("HubUnavailable", f"{url}: {cause}", retry=True)
        return LoadFailed("BrokenTransfer", f"{url}: {error}", retry=True)


def _hub_file(entry: Mapping[str, Any]) -> HubFile:
    lfs = entry.get("lfs") or {}
    size = lfs.get("size", entry.get("size"))
    digest = _SHA256.fullmatch(str(lfs.get("sha256", "")))
    return HubFile(str(entry["rfilename"]), size if isinstance(size, int) else None, digest[1] if digest else None)


def _span(status: int, headers: Mapping[str, str]) -> tuple[int, int | None]:
    """First byte of an answer, and the whole file's size."""
    if status == 206 and (span := _CONTENT_RANGE.fullmatch(headers.get("Content-Range", ""))):
        return int(span[1]), None if span[2] == "*" else int(span[2])
    length = headers.get("Content-Length", "")
    return 0, int(length) if length.isdigit() and status == 200 else None


def _quoted(revision: str) -> str:
    return urllib.parse.quote(revision, safe="")
