"""`python -m prism_operator.loader`: downloads one revision of a model into a directory, once.

Runs in a Job of its own with the only copy of the token (`HF_TOKEN`), and needs nothing but the standard library. A
broken download goes on where it stopped; a file gets its name when it is whole and right; `.complete`, with the commit
in it, comes last. What went wrong is an exit code and one line for the pod's status.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prism_operator.hub import Hub, HubFile, LoadFailed, RangeRefused, Revision

EXIT_CODES = {
    "Unauthorized": 10,
    "NotFound": 11,
    "DiskFull": 12,
    "BrokenTransfer": 13,
    "Timeout": 14,
    "HubUnavailable": 15,
    "StorageFailed": 16,
}
COMPLETE = ".complete"
COMMIT = ".commit"
LOCK = ".lock"
PART_SUFFIX = ".part"
KEPT_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".txt"})
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
TERMINATED = 143


@dataclass(frozen=True, slots=True)
class Patience:
    """`tries` without a new byte; the wait before each doubles from `first_wait_s`."""

    tries: int = 5
    first_wait_s: float = 1.0

    def wait(self, failures: int) -> None:
        time.sleep(min(60.0, self.first_wait_s * 2 ** (failures - 1)))


def load(hub: Hub, revision: str, directory: Path, patience: Patience) -> str:
    """The commit that is in `directory` when it returns. Raises LoadFailed."""
    with _storage(directory), _locked(directory):
        marker = directory / COMPLETE
        if marker.is_file():
            return marker.read_text().strip()
        found = _listed(hub, revision, patience)
        files = wanted(found)
        _forget_other_commits(directory, found.commit)
        _check_room(directory, files)
        for file in files:
            if not (directory / file.name).is_file():  # a whole file was checked before it got its name
                _download(hub, found.commit, file, directory, patience)
        _write_whole(marker, found.commit)
        return found.commit


def wanted(revision: Revision) -> list[HubFile]:
    """Weights, configuration, templates, tokenizer; no pickles, no pictures. LoadFailed where there are no weights."""
    files = [file for file in revision.files if _is_wanted(PurePosixPath(file.name))]
    if not any(file.name.endswith(".safetensors") for file in files):
        raise LoadFailed("NotFound", f"commit {revision.commit} has no safetensors files")
    return files


def _is_wanted(path: PurePosixPath) -> bool:
    """The hub's names are not trusted: nothing is written outside the directory or over our own files."""
    if path.is_absolute() or any(part.startswith(".") for part in path.parts) or not path.name:
        return False
    return path.suffix in KEPT_SUFFIXES or path.name.startswith("tokenizer")


def _listed(hub: Hub, revision: str, patience: Patience) -> Revision:
    failures = 0
    while True:
        try:
            return hub.revision(revision)
        except LoadFailed as failed:
            failures += 1
            if not failed.retry or failures >= patience.tries:
                raise
            patience.wait(failures)


def _download(hub: Hub, commit: str, file: HubFile, directory: Path, patience: Patience) -> None:
    """Tries as long as bytes come in. What was thrown away and came again is no progress, so it ends."""
    final = directory / file.name
    final.parent.mkdir(parents=True, exist_ok=True)
    part = final.with_name(f".{final.name}{PART_SUFFIX}")
    failures, most = 0, _size(part)
    while True:
        try:
            _transfer(hub, commit, file, part)
            break
        except LoadFailed as failed:
            failures = 1 if _size(part) > most else failures + 1
            most = max(most, _size(part))
            if not failed.retry or failures >= patience.tries:
                raise
            print(f"{failed.message}; {_size(part):,} bytes are there, trying again", flush=True)
            patience.wait(failures)
    os.replace(part, final)
    _sync_directory(final.parent)
    print(f"{file.name}: {final.stat().st_size:,} bytes", flush=True)


def _transfer(hub: Hub, commit: str, file: HubFile, part: Path) -> None:
    """One request for what is missing; then the whole is checked. A part that is wrong is thrown away."""
    have = _size(part)
    if have and have == file.size and file.sha256:  # broke off between the last byte and the check
        _check(part, file.size, file.sha256, file.name)
        return
    try:
        transfer = hub.read(commit, file.name, have)
    except RangeRefused:
        part.unlink(missing_ok=True)
        raise
    if transfer.start not in (0, have):
        raise LoadFailed("BrokenTransfer", f"{file.name}: asked for byte {have:,}, got {transfer.start:,}", retry=True)
    with part.open("r+b" if part.exists() else "wb") as out:
        out.seek(transfer.start)
        out.truncate()
        for chunk in transfer.chunks:
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    size = file.size if file.size is not None else transfer.size
    _check(part, size, file.sha256 or transfer.sha256, file.name)


def _check(part: Path, size: int | None, sha256: str | None, name: str) -> None:
    have = _size(part)
    if size is not None and have < size:
        raise LoadFailed("BrokenTransfer", f"{name}: {have:,} of {size:,} bytes came", retry=True)
    if size is not None and have > size:
        part.unlink()
        raise LoadFailed("BrokenTransfer", f"{name}: {have:,} bytes came, it should be {size:,}", retry=True)
    if sha256 is None:
        return
    with part.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != sha256:
        part.unlink()
        raise LoadFailed("BrokenTransfer", f"{name}: SHA-256 is {digest}, it should be {sha256}", retry=True)


def _forget_other_commits(directory: Path, commit: str) -> None:
    """A branch may have moved since the last try: files of two commits are never mixed."""
    note = directory / COMMIT
    if note.is_file() and note.read_text() == commit:
        return
    for entry in directory.iterdir():
        if entry.name != LOCK:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    _write_whole(note, commit)


def _check_room(directory: Path, files: Sequence[HubFile]) -> None:
    """Said before hours of downloading, where the listing tells sizes."""
    missing = [file for file in files if not (directory / file.name).is_file()]
    parts = sum(_size((directory / file.name).with_name(f".{Path(file.name).name}{PART_SUFFIX}")) for file in missing)
    needed = sum(file.size or 0 for file in missing) - parts
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise LoadFailed("DiskFull", f"{needed:,} bytes are still to come and {free:,} are free")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}{PART_SUFFIX}")
    with temporary.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _storage(directory: Path) -> Iterator[None]:
    """What the volume refuses, said as such."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            free = shutil.disk_usage(directory).free
            raise LoadFailed("DiskFull", f"{error.strerror} in {directory}; {free:,} bytes are free") from None
        raise LoadFailed("StorageFailed", f"{error.filename or directory}: {error.strerror or error}") from None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Loaders that share a claim take turns; the second finds `.complete`."""
    with (directory / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("prism_operator.loader", description="Download a model; token in HF_TOKEN.")
    parser.add_argument("--repository", required=True, help="owner/name")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--endpoint", default="https://huggingface.co")
    parser.add_argument("--directory", required=True, type=Path)
    parser.add_argument("--timeout-s", type=float, default=60.0, help="of each connect and read")
    parser.add_argument("--tries", type=int, default=5, help="without a new byte")
    parser.add_argument("--first-wait-s", type=float, default=1.0, help="before the second try; doubles")
    parser.add_argument("--termination-log", type=Path, default=Path("/dev/termination-log"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # the first process of a container has no default
    hub = Hub(arguments.endpoint, arguments.repository, os.environ.get("HF_TOKEN"), arguments.timeout_s)
    patience = Patience(arguments.tries, arguments.first_wait_s)
    try:
        commit = load(hub, arguments.revision, arguments.directory, patience)
    except LoadFailed as failed:
        line = f"{failed.reason}: {failed.message}"
        print(line, file=sys.stderr)
        if arguments.termination_log.exists():  # the kubelet makes it
            arguments.termination_log.write_text(line)
        return EXIT_CODES[failed.reason]
    print(f"{arguments.repository} at {commit} is complete in {arguments.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
