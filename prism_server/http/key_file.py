"""Secrets in files: API keys and the admin token, re-read when the file changes, compared in constant time.

A look at a file is a stat of it, some microseconds on the tmpfs of a mounted Secret, so it happens on the event loop.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from pathlib import Path

from prism_server.errors import BadRequest, StartupError

CHECK_INTERVAL_S = 1.0
GRACE_S = 10.0
"""How long the keys of the file before the last change stay valid: a file caught half-written costs nobody a 401."""

log = logging.getLogger(__name__)

FileVersion = tuple[str, int, int, int]


class KeyFile:
    """A file with one secret a line, or a directory of such files (as Kubernetes mounts a Secret: hidden names are its
    own); blank lines and lines that begin with `#` do not count.

    An unreadable or empty new version keeps the last good keys. `name` is what the file holds, for messages.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._version: tuple[FileVersion, ...] | None = None
        self._first = ""
        self._digests: frozenset[bytes] = frozenset()
        self._before: frozenset[bytes] = frozenset()
        self._before_until_s = 0.0
        self._checked_s = time.monotonic()
        self.problem = self._reload()
        """What is wrong with the newest version, while the last good keys stay valid; None when nothing is."""
        if self.problem:
            raise StartupError(f"{name}: {self.problem}")

    def accepts(self, secret: str) -> bool:
        """Whether `secret` is one of the keys. Looks at the file at most once a second, and for every unknown key."""
        now_s = self._look()
        if self._holds(secret, now_s):
            return True
        self._refresh(now_s)  # the key may be newer than the last look
        return self._holds(secret, now_s)

    def first(self) -> str:
        """The first key, for who has one to show. Looks at the file at most once a second."""
        self._look()
        return self._first

    def check(self) -> str | None:
        """Looks at the files now; says what is wrong with them, if anything."""
        self._refresh(time.monotonic())
        return self.problem

    def _holds(self, secret: str, now_s: float) -> bool:
        digest = _digest(secret)
        valid = self._digests | (self._before if now_s < self._before_until_s else frozenset())
        matches = [hmac.compare_digest(digest, known) for known in valid]  # all of them: no early exit to time
        return any(matches)

    def _look(self) -> float:
        """Now, in monotonic seconds; what is known of the file is no older than the interval."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_INTERVAL_S:
            self._refresh(now_s)
        return now_s

    def _refresh(self, now_s: float) -> None:
        self._checked_s = now_s
        before, version = self._digests, self._version
        problem, known = self._reload(), self.problem
        self.problem = problem
        if problem:
            if problem != known:
                log.warning("%s: %s; the last good ones stay valid", self._name, problem)
        elif version != self._version and before != self._digests:
            self._before, self._before_until_s = before, now_s + GRACE_S

    def _reload(self) -> str | None:
        """Takes the file's keys in if it changed; says what is wrong with it, if anything."""
        try:
            files = self._files()
            version = tuple(map(_version_of, files))
            if version == self._version:
                return None
            lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            return f"cannot read {self._path}: {error}"
        secrets = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not secrets:
            return f"{self._path} holds no key"
        self._version, self._first, self._digests = version, secrets[0], frozenset(map(_digest, secrets))
        return None

    def _files(self) -> list[Path]:
        if not self._path.is_dir():
            return [self._path]
        return sorted(file for file in self._path.iterdir() if file.is_file() and not file.name.startswith("."))


def _version_of(file: Path) -> FileVersion:
    stat = file.stat()
    return file.name, stat.st_mtime_ns, stat.st_ino, stat.st_size


def _digest(secret: str) -> bytes:
    """Equal lengths for the comparison, whatever the secret's."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def check_bearer(keys: KeyFile | None, authorization: str | None) -> None:
    """Raises a 401 unless `authorization` is `Bearer KEY` with a valid key, or no key is asked for."""
    if keys is None:
        return
    scheme, _, secret = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not secret.strip():
        raise BadRequest("an API key is needed: Authorization: Bearer KEY", status=401, code="missing_api_key")
    if not keys.accepts(secret.strip()):
        raise BadRequest("the API key is not valid", status=401, code="invalid_api_key")
