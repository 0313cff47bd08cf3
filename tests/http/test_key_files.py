"""Secrets in files: rotation without a 401 in between, bad new files cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism_server.errors import BadRequest, StartupError
from prism_server.http import key_file
from prism_server.http.key_file import KeyFile, check_bearer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# the team's\nold-key\n\n  spaced-key  \n")
    return path


def test_each_line_is_a_key(path: Path) -> None:
    keys = KeyFile(path, "keys")
    assert keys.accepts("old-key")
    assert keys.accepts("spaced-key")
    assert not keys.accepts("# the team's")
    assert not keys.accepts("")


def test_api_keys_rotate_without_a_restart_and_without_a_401_in_between(path: Path) -> None:
    keys = KeyFile(path, "keys")
    path.write_text("old-key\nnew-key\n")
    assert keys.accepts("new-key")
    assert keys.accepts("old-key")
    path.write_text("new-key\n")
    assert keys.accepts("new-key")


def test_the_first_key_is_the_one_to_show_and_the_last_good_one_stays(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "CHECK_INTERVAL_S", 3600.0)
    keys = KeyFile(path, "keys")
    path.write_text("new-key\nold-key\n")
    assert keys.first() == "old-key"  # no look at the file for each use
    monkeypatch.setattr(key_file, "CHECK_INTERVAL_S", 0.0)
    assert keys.first() == "new-key"
    path.write_text("")
    assert keys.first() == "new-key"


def test_what_is_wrong_with_the_newest_keys_is_said_until_it_is_right(path: Path) -> None:
    keys = KeyFile(path, "keys")
    assert keys.check() is None
    path.write_text("# nothing\n")
    assert "holds no key" in (keys.check() or "")
    path.write_text("new-key\n")
    assert keys.check() is None


def test_a_directory_of_key_files_rotates_as_a_mounted_secret_does(tmp_path: Path) -> None:
    """Kubernetes swaps a hidden link to a new directory; the visible names are links through it."""

    def mount(name: str, files: dict[str, str]) -> None:
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
            if not (tmp_path / file).is_symlink():
                (tmp_path / file).symlink_to(f"..data/{file}")
        (tmp_path / "..new").symlink_to(name)
        (tmp_path / "..new").rename(tmp_path / "..data")

    mount("..1", {"team-a": "key-a\n", "team-b": "key-b"})
    keys = KeyFile(tmp_path, "keys")
    assert keys.accepts("key-a")
    assert keys.accepts("key-b")
    mount("..2", {"team-a": "key-a2\nkey-a\n", "team-b": "key-b"})
    assert keys.accepts("key-a2")
    assert keys.accepts("key-a")


def test_a_removed_key_ends_after_the_grace_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyFile(path, "keys")
    monkeypatch.setattr(key_file, "GRACE_S", 0.0)
    path.write_text("new-key\n")
    assert keys.accepts("new-key")
    assert not keys.accepts("old-key")


def test_a_file_caught_half_written_costs_nobody_a_401(path: Path) -> None:
    keys = KeyFile(path, "keys")
    for half in ("", "new"):
        path.write_text(half)
        assert not keys.accepts("unknown")
        assert keys.accepts("old-key")


def test_a_bad_new_file_keeps_the_last_good_keys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyFile(path, "keys")
    monkeypatch.setattr(key_file, "GRACE_S", 0.0)
    path.write_bytes(b"\xff\xfe")
    assert not keys.accepts("unknown")
    assert keys.accepts("old-key")
    path.unlink()
    assert not keys.accepts("unknown")
    assert keys.accepts("old-key")


@pytest.mark.parametrize("content", [None, "", "\n# nothing\n"])
def test_a_file_without_a_key_is_a_start_up_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartupError, match="keys"):
        KeyFile(path, "http.api_keys_file")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic old-key", "old-key", "Bearer nobody"])
def test_anything_but_a_bearer_token_that_is_known_is_a_401(path: Path, header: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        check_bearer(KeyFile(path, "keys"), header)
    assert caught.value.status == 401


def test_a_known_bearer_token_passes_and_without_a_file_everybody_does(path: Path) -> None:
    check_bearer(KeyFile(path, "keys"), "bearer old-key")
    check_bearer(None, None)
