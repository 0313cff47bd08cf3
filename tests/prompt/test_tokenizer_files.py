"""Loading a checkpoint's tokenizer, and the table of what was encoded before."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prism_server.errors import StartupError
from prism_server.prompt.memo import TextMemo
from prism_server.prompt.tokenizer import Tokenizer

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def directory(tmp_path: Path, released_style_dir: Path) -> Path:
    return Path(shutil.copytree(released_style_dir, tmp_path / "checkpoint"))


def edit(path: Path, change: Edit) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def test_ids_come_from_the_files(directory: Path) -> None:
    tokenizer = Tokenizer.load(directory)
    added = tokenizer.added_tokens
    assert tokenizer.media_tokens.image_pad == added["<|image_pad|>"]
    assert tokenizer.media_tokens.vision_end == added["<|vision_end|>"]
    assert tokenizer.eos_ids == (added["<|im_end|>"],)
    assert tokenizer.vocab_size == 512
    assert added["<think>"] not in tokenizer.special_ids
    assert added["<|im_end|>"] in tokenizer.special_ids
    both = [added["<|im_end|>"], added["<|endoftext|>"]]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": both}))
    assert Tokenizer.load(directory).eos_ids == tuple(both)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": both[1]}))
    assert Tokenizer.load(directory).eos_ids == (both[1],)


def test_a_token_that_only_the_tokenizer_config_names_is_known(directory: Path) -> None:
    entry = {"content": "<extra>", "special": False}
    edit(directory / "tokenizer_config.json", lambda d: d.update(added_tokens_decoder={"500": entry}))
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.added_tokens["<extra>"] == 500
    assert tokenizer.token_bytes(500) == b"<extra>"
    assert tokenizer.token_bytes(501) == b""


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("tokenizer.json", None, "is not there"),
        ("config.json", None, "is not there"),
        ("tokenizer.json", lambda d: d.pop("model"), "is not a tokenizer"),
        ("tokenizer.json", lambda d: d.update(decoder={"type": "WordPiece"}), "not a byte-level tokenizer"),
        ("tokenizer.json", lambda d: d["added_tokens"][0].update(rstrip=True), "strips its neighbours"),
        ("tokenizer.json", lambda d: d["added_tokens"][0].update(content="a", id=64), "become the control token 64"),
        ("config.json", lambda d: d.pop("image_token_id"), "image_token_id None is not an added token"),
        ("config.json", lambda d: d.update(vision_end_token_id=3), "vision_end_token_id 3 is not an added token"),
        ("config.json", lambda d: d.update(image_token_id=d["video_token_id"]), "must differ"),
        ("config.json", lambda d: d["text_config"].update(vocab_size=400), "vocab_size 400 has no room"),
        ("tokenizer_config.json", lambda d: d.pop("eos_token"), "what ends a text"),
    ],
)
def test_a_missing_or_broken_file_is_one_clear_line(
    directory: Path, name: str, change: Edit | None, reason: str
) -> None:
    if change is None:
        (directory / name).unlink()
    else:
        edit(directory / name, change)
    with pytest.raises(StartupError, match=reason) as caught:
        Tokenizer.load(directory)
    assert "\n" not in caught.value.reason


@pytest.mark.parametrize("content", ["{", "[]", "\ufeff"])
def test_a_file_that_is_not_a_json_object_is_one_clear_line(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(StartupError, match=r"config\.json") as caught:
        Tokenizer.load(directory)
    assert "\n" not in caught.value.reason


def test_text_seen_before_is_not_encoded_again(released_style_dir: Path) -> None:
    tokenizer = Tokenizer.load(released_style_dir)
    first = tokenizer.encode_runs(["one two", "three", "one two"])
    again = tokenizer.encode_runs(["three", "one two"])
    assert first[0] is first[2] is again[1]
    assert first[1] is again[0]
    assert (tokenizer.memo.hits, tokenizer.memo.misses, len(tokenizer.memo)) == (2, 2, 2)
    with pytest.raises(ValueError, match="read-only"):
        first[0][0] = 0


def test_a_memo_with_room_for_one_text_keeps_the_last_and_counts() -> None:
    ids = np.arange(4, dtype=np.int32)
    size = TextMemo(10_000)
    size.put("one", ids)
    memo = TextMemo(size.used_bytes)
    memo.put("one", ids.copy())
    memo.put("two", ids.copy())
    assert memo.get("one") is None
    assert memo.get("two") is not None
    memo.put("x" * 10_000, ids.copy())
    assert memo.get("two") is not None
    assert (len(memo), memo.evictions, memo.used_bytes) == (1, 1, size.used_bytes)
    nothing = TextMemo(0)
    nothing.put("one", ids.copy())
    assert len(nothing) == 0
    with pytest.raises(ValueError, match="negative"):
        TextMemo(-1)


def test_a_memo_evicts_what_was_used_longest_ago() -> None:
    ids = np.arange(1, dtype=np.int32)
    memo = TextMemo(10_000)
    memo.put("a", ids)
    memo.capacity_bytes = 2 * memo.used_bytes
    memo.put("b", ids)
    assert memo.get("a") is not None
    memo.put("c", ids)
    assert memo.get("b") is None
    assert memo.get("a") is not None


def test_a_memo_stays_within_its_bytes_under_threads(released_style_dir: Path) -> None:
    tokenizer = Tokenizer.load(released_style_dir, memo_bytes=4096)
    expected = {
        f"text {i}": Tokenizer.load(released_style_dir).encode_runs([f"text {i}"])[0].tolist() for i in range(3)
    }
    wrong: list[str] = []

    def work(seed: int) -> None:
        for i in range(200):
            text = f"text {(i * seed) % 40}"
            ids = tokenizer.encode_runs([text])[0].tolist()
            if text in expected and ids != expected[text]:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert tokenizer.memo.used_bytes <= 4096
    assert tokenizer.memo.hits + tokenizer.memo.misses == 800
