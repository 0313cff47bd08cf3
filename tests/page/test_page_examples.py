"""The gallery: as its script makes it, and such that the bundled model answers every suggested question."""

from __future__ import annotations

import base64
import io
import json

import httpx
import numpy as np
import pytest
from PIL import Image, ImageSequence

from prism_server.bench.page_examples import DIRECTORY, Example, File, examples
from prism_server.bench.server_process import ServerProcess

EXAMPLES = {example.id: example for example in examples()}
MOST_BYTES = 256 << 10


def part(file: File) -> dict[str, object]:
    kind, media_type = ("video_url", "image/gif") if file.is_clip else ("image_url", "image/png")
    data = base64.b64encode((DIRECTORY / file.name).read_bytes()).decode()
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{data}"}}


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_bundled_files_are_those_that_the_script_draws(example: Example) -> None:
    for file in example.files:
        bundled = Image.open(io.BytesIO((DIRECTORY / file.name).read_bytes()))
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(bundled)]
        assert len(frames) == len(file.frames)
        for frame, drawn in zip(frames, file.frames, strict=True):
            assert frame.size == drawn.size
            # other versions of FreeType shade the edges of letters a little otherwise
            assert np.abs(np.asarray(frame, int) - np.asarray(drawn, int)).mean() < 1.0


def test_the_list_names_the_files_and_there_are_no_others() -> None:
    listed = json.loads((DIRECTORY / "examples.json").read_text("utf-8"))["examples"]
    assert listed == [example.entry() for example in EXAMPLES.values()]
    names = {file.name for example in EXAMPLES.values() for file in example.files}
    assert {path.name for path in DIRECTORY.iterdir()} == names | {"examples.json"}
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < MOST_BYTES


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_bundled_model_answers_every_suggested_question(example: Example, page_server: ServerProcess) -> None:
    if any(file.is_clip for file in example.files):
        pytest.importorskip("av")
    parts = [part(file) for file in example.files]
    for turn in example.turns:
        content = [*parts, {"type": "text", "text": turn.question}]
        body = {"messages": [{"role": "user", "content": content}], "stream": False, "max_tokens": 160}
        answer = httpx.post(f"{page_server.api_url}/v1/generate", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        assert answer.json()["samples"][0]["text"] == turn.answer
