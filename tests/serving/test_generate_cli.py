"""`prism-generate`: one request offline, on the bundled model."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
from clip_making import lossless

from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample, encode_png


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    options = ["--model.threads=1", f"--kv.memory_bytes={8 << 20}"]
    command = [sys.executable, "-m", "prism_server.serving.generate_cli", *options]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_it_answers_about_pictures_as_text_or_json(tmp_path: Path) -> None:
    sample = draw_sample(random.Random(3), LAYOUT_BY_NAME["scenes-2"])
    images: list[str] = []
    for i, picture in enumerate(sample.pictures):
        path = tmp_path / f"page{i}.png"
        path.write_bytes(encode_png(picture))
        images += ["--image", str(path)]
    question = "How many pictures are there?"
    text = generate(*images, question)
    assert (text.returncode, text.stderr) == (0, "")
    assert text.stdout == "2\n"
    as_json = generate(*images, question, "--json")
    answer = json.loads(as_json.stdout)
    assert answer["samples"][0]["text"] == "2"
    assert answer["usage"]["encoded_items"] == 2
    assert answer["prism"]["timings"]["total_ms"] > 0


def test_it_answers_about_clips_and_pictures_in_the_order_given(tmp_path: Path) -> None:
    sample = draw_sample(random.Random(4), LAYOUT_BY_NAME["clip-8"])
    clip, picture = tmp_path / "clip.mkv", tmp_path / "picture.png"
    clip.write_bytes(lossless([np.asarray(frame) for frame in sample.pictures], 2))
    picture.write_bytes(encode_png(sample.pictures[0]))
    turn = sample.turns[0]
    answer = generate("--video", str(clip), turn.question)
    assert (answer.returncode, answer.stdout) == (0, turn.answer + "\n")
    both = generate("--image", str(picture), "--video", str(clip), "What?", "--json", "--max-tokens=1")
    usage = json.loads(both.stdout)["usage"]
    assert (usage["encoded_items"], usage["clip_frames"], usage["prefilled_media_tokens"]) == (2, 8, 45)


def test_what_a_user_can_put_right_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    for arguments, named in (
        (("--image", str(tmp_path / "nowhere.png"), "What?"), "nowhere.png"),
        (("--image", str(broken), "What?"), "broken.png"),
        (("--video", str(broken), "What?"), "broken.png"),
        (("--temperature=-1", "What?"), "temperature"),
        (("--kv.dtyp=fp8", "What?"), "dtyp"),
        ((), "question"),
    ):
        done = generate(*arguments)
        assert done.returncode == 2, done.stderr
        (line,) = done.stderr.strip().splitlines()
        assert named in line
