"""The model loader against a hub on localhost: it resumes, checks, and says what went wrong."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from stand_in_hub import COMMIT, REPOSITORY, StandInHub, serving

from prism_operator import loader
from prism_operator.hub import Hub
from prism_operator.loader import EXIT_CODES

WEIGHTS = random.Random(7).randbytes(300_000)
FILES = {
    "config.json": b'{"model_type": "qwen3_vl"}',
    "tokenizer.json": b"{}",
    "merges.txt": b"",
    "chat_template.jinja": b"{{ x }}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[:1000],
    "README.md": b"no",
    "pytorch_model.bin": b"no",
    ".gitattributes": b"no",
    "../outside.json": b"no",
    "/etc/absolute.json": b"no",
}
FIRST = "model-00001-of-00002.safetensors"
WANTED = sorted(name for name in FILES if FILES[name] != b"no")


@pytest.fixture
def hubs() -> Iterator[Callable[[StandInHub], StandInHub]]:
    with ExitStack() as stack:
        yield lambda hub: stack.enter_context(serving(hub))


@pytest.fixture
def hub(hubs: Callable[[StandInHub], StandInHub]) -> StandInHub:
    return hubs(StandInHub(dict(FILES)))


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)


def arguments(hub: StandInHub, directory: Path, log: Path, *more: str) -> list[str]:
    where = [f"--endpoint={hub.url}", f"--repository={REPOSITORY}", f"--directory={directory}"]
    return [*where, f"--termination-log={log}", "--tries=3", "--first-wait-s=0.01", "--timeout-s=10", *more]


def run(hub: StandInHub, tmp_path: Path, *more: str, directory: Path | None = None) -> tuple[int, str]:
    """Exit code and termination message."""
    log = tmp_path / "termination-log"
    log.write_text("")
    code = loader.main(arguments(hub, directory or tmp_path / "model", log, *more))
    return code, log.read_text()


def loaded(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def test_a_model_is_downloaded_and_marked_complete(hub: StandInHub, tmp_path: Path) -> None:
    assert run(hub, tmp_path) == (0, "")
    directory = tmp_path / "model"
    assert loaded(directory) == {name: FILES[name] for name in WANTED}
    assert (directory / ".complete").read_text() == COMMIT
    assert not list(tmp_path.rglob("*.part"))
    assert not (tmp_path / "outside.json").exists()


def test_a_complete_model_asks_the_hub_for_nothing(hub: StandInHub, tmp_path: Path) -> None:
    run(hub, tmp_path)
    hub.asked.clear()
    assert run(hub, tmp_path) == (0, "")
    assert hub.asked == []


def test_a_revision_with_a_slash_is_one_path_segment(hub: StandInHub, tmp_path: Path) -> None:
    assert run(hub, tmp_path, "--revision=v/2")[0] == 0


def test_a_broken_transfer_goes_on_where_it_stopped(hub: StandInHub, tmp_path: Path) -> None:
    hub.cut_after = [100_000, 50_000]
    assert run(hub, tmp_path) == (0, "")
    assert loaded(tmp_path / "model")[FIRST] == WEIGHTS
    ranges = [span for path, span, _ in hub.asked if path.endswith(FIRST)]
    assert ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_the_next_loader_goes_on_where_the_last_one_gave_up(hub: StandInHub, tmp_path: Path) -> None:
    hub.cut_after = [100_000, 0, 0]
    code, message = run(hub, tmp_path)
    assert (code, message.partition(":")[0]) == (EXIT_CODES["BrokenTransfer"], "BrokenTransfer")
    assert not (tmp_path / "model" / ".complete").exists()
    assert FIRST not in loaded(tmp_path / "model")
    hub.asked.clear()
    assert run(hub, tmp_path) == (0, "")
    assert [span for path, span, _ in hub.asked if path.endswith(FIRST)] == ["bytes=100000-"]
    assert not [path for path, _, _ in hub.asked if path.endswith("config.json")]
    assert loaded(tmp_path / "model")[FIRST] == WEIGHTS


@pytest.mark.parametrize("lists", [True, False])
def test_a_hub_that_cannot_resume_sends_the_whole_file(hub: StandInHub, tmp_path: Path, lists: bool) -> None:
    hub.cut_after, hub.ignores_range = [100_000], True
    hub.lists_sizes = hub.lists_digests = lists
    assert run(hub, tmp_path) == (0, "")
    assert loaded(tmp_path / "model")[FIRST] == WEIGHTS


def test_a_range_that_is_refused_starts_the_file_again(hub: StandInHub, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / ".commit").write_text(COMMIT)
    (directory / f".{FIRST}.part").write_bytes(WEIGHTS + b"more")
    hub.lists_sizes = hub.lists_digests = False
    assert run(hub, tmp_path) == (0, "")
    assert loaded(directory)[FIRST] == WEIGHTS


def test_files_of_two_commits_are_never_mixed(hub: StandInHub, tmp_path: Path) -> None:
    hub.cut_after = [100_000, 0, 0]
    assert run(hub, tmp_path)[0] != 0
    hub.commit = "d" * 40
    hub.files |= {"config.json": b'{"model_type": "qwen3_vl" }', FIRST: WEIGHTS[::-1]}
    assert run(hub, tmp_path) == (0, "")
    assert loaded(tmp_path / "model") == {name: hub.files[name] for name in WANTED}
    assert (tmp_path / "model" / ".complete").read_text() == "d" * 40


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_refused_is_unauthorized(hub: StandInHub, tmp_path: Path, status: int) -> None:
    hub.statuses = [status]
    code, message = run(hub, tmp_path)
    assert code == EXIT_CODES["Unauthorized"]
    assert message.startswith(f"Unauthorized: {hub.url}")
    assert "\n" not in message
    assert len(hub.asked) == 1


def test_the_token_is_sent_and_a_missing_one_is_said(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    code, message = run(hub, tmp_path)
    assert (code, "needs a token" in message) == (EXIT_CODES["Unauthorized"], True)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run(hub, tmp_path) == (0, "")


def test_the_token_stays_with_the_hub(
    hub: StandInHub, hubs: Callable[[StandInHub], StandInHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = hubs(StandInHub(dict(FILES)))
    hub.token, hub.store, hub.lists_digests = "secret", store.url, False
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run(hub, tmp_path) == (0, "")
    assert store.file_requests()
    assert {token for _, _, token in store.asked} == {None}
    assert {token for _, _, token in hub.asked} == {"Bearer secret"}


def test_the_hubs_digest_on_the_redirect_counts(
    hub: StandInHub, hubs: Callable[[StandInHub], StandInHub], tmp_path: Path
) -> None:
    store = hubs(StandInHub(dict(FILES), sends_instead={FIRST: WEIGHTS[::-1]}))
    hub.store, hub.lists_digests = store.url, False
    code, message = run(hub, tmp_path)
    assert (code, "SHA-256" in message) == (EXIT_CODES["BrokenTransfer"], True)


@pytest.mark.parametrize("status", [404])
def test_no_such_repository_is_not_found(hub: StandInHub, tmp_path: Path, status: int) -> None:
    hub.statuses = [status]
    code, message = run(hub, tmp_path)
    assert (code, message.partition(":")[0]) == (EXIT_CODES["NotFound"], "NotFound")


def test_a_repository_without_weights_is_not_found(hub: StandInHub, tmp_path: Path) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    code, message = run(hub, tmp_path)
    assert (code, "no safetensors" in message) == (EXIT_CODES["NotFound"], True)


def test_a_hub_that_is_busy_is_asked_again(hub: StandInHub, tmp_path: Path) -> None:
    hub.statuses = [503, 429]
    assert run(hub, tmp_path) == (0, "")


def test_a_hub_that_stays_away_is_unavailable(hub: StandInHub, tmp_path: Path) -> None:
    hub.statuses = [503] * 9
    code, message = run(hub, tmp_path)
    assert (code, message.partition(":")[0]) == (EXIT_CODES["HubUnavailable"], "HubUnavailable")
    assert len(hub.asked) == 3
    hub.url = "http://127.0.0.1:9"  # nobody listens there
    assert run(hub, tmp_path)[0] == EXIT_CODES["HubUnavailable"]


def test_a_hub_that_stalls_is_a_timeout(hub: StandInHub, tmp_path: Path) -> None:
    hub.stall = True
    code, message = run(hub, tmp_path, "--timeout-s=0.2", "--tries=2")
    assert (code, message.partition(":")[0]) == (EXIT_CODES["Timeout"], "Timeout")


@pytest.mark.parametrize("sent", [WEIGHTS[:-1], WEIGHTS + b"x"], ids=["short", "long"])
def test_a_wrong_size_is_a_broken_transfer(hub: StandInHub, tmp_path: Path, sent: bytes) -> None:
    hub.sends_instead, hub.lists_digests = {FIRST: sent}, False
    code, message = run(hub, tmp_path)
    assert (code, "300,000" in message) == (EXIT_CODES["BrokenTransfer"], True)
    assert FIRST not in loaded(tmp_path / "model")


def test_a_wrong_digest_is_a_broken_transfer_and_the_part_is_thrown_away(hub: StandInHub, tmp_path: Path) -> None:
    hub.sends_instead = {FIRST: WEIGHTS[::-1]}
    code, message = run(hub, tmp_path)
    assert (code, "SHA-256" in message) == (EXIT_CODES["BrokenTransfer"], True)
    assert not list(tmp_path.rglob("*.part"))
    hub.sends_instead = {}
    assert run(hub, tmp_path) == (0, "")


def test_a_disk_that_fills_up_is_said(hub: StandInHub, tmp_path: Path) -> None:
    """A file-size limit stands in for the disk: the write fails in the same place."""
    log = tmp_path / "log"
    log.write_text("")
    hub.lists_sizes = hub.lists_digests = False
    done = subprocess.run(
        [sys.executable, "-m", "prism_operator.loader", *arguments(hub, tmp_path / "model", log)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == EXIT_CODES["DiskFull"], done.stderr
    assert log.read_text().startswith("DiskFull: File too large")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.mark.parametrize("lists", [True, False])
def test_a_disk_that_is_too_small_is_said_with_figures(
    hub: StandInHub, tmp_path: Path, small_disk: Path, lists: bool
) -> None:
    hub.lists_sizes = hub.lists_digests = lists
    code, message = run(hub, tmp_path, directory=small_disk / "model")
    assert (code, message.partition(":")[0]) == (EXIT_CODES["DiskFull"], "DiskFull")
    assert "are free" in message
    assert (not hub.file_requests()) == lists  # sizes that are known are added up before anything is downloaded


def test_a_directory_that_cannot_be_written_is_said(hub: StandInHub, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, message = run(hub, tmp_path, directory=tmp_path / "file" / "model")
    assert (code, message.partition(":")[0]) == (EXIT_CODES["StorageFailed"], "StorageFailed")


def test_the_loader_needs_the_standard_library_only() -> None:
    script = (
        "import sys; before = set(sys.modules); import prism_operator.loader;"
        "roots = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(roots - set(sys.stdlib_module_names) - {'prism_operator'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_hub_says_sizes_and_digests_where_it_can(hub: StandInHub) -> None:
    listed = Hub(hub.url, REPOSITORY, None, 10.0).revision("main")
    assert listed.commit == COMMIT
    weights = next(file for file in listed.files if file.name == FIRST)
    assert (weights.size, len(weights.sha256 or "")) == (len(WEIGHTS), 64)
