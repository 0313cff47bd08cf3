"""Clips beside pictures through the whole engine: the reference's tokens, whatever the cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from engine_support import Parts, running_engine
from PIL import Image
from reference import DEMO_CHECKPOINT
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from prism_server.bench.reference_clips import ClipReference
from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample, encode_png
from prism_server.engine import rehearsal
from prism_server.engine.encoding import _joined
from prism_server.engine.plan import MediaRows
from prism_server.engine.runner import Runner, RunnerLimits
from prism_server.identity import MediaOptions, content_id
from prism_server.media.item import ItemKey, MediaItem, Patches
from prism_server.model import vision

MAX_TOKENS = 8
NUM_PROMPTS = 16
FPS = 2.0
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "chunks of 5, inside frames": {"engine__chunk_tokens": 5},
    "one vision block a step": {"engine__step_budget_ms": 0.001},
    "a feature cache of one clip": {"engine__feature_cache_bytes": 300 * 1024},
}


@dataclass(frozen=True)
class Asked:
    """A message of text, pictures and clips in some order, and what it shows."""

    parts: Parts
    shown: list[Image.Image | list[Image.Image]]


def draw(rng: random.Random) -> Asked:
    parts: list[str | bytes | MediaItem] = []
    shown: list[Image.Image | list[Image.Image]] = []
    for letter in rng.choice(["vt", "ivt", "vit", "tvit", "ivit", "vvt", "tviv"]):
        if letter == "t":
            parts.append(rng.choice(["What happens in the video?", "Describe the picture.", "then:"]))
        elif letter == "i":
            (picture,) = draw_sample(rng, LAYOUT_BY_NAME["scene-96"]).pictures
            parts.append(encode_png(picture))
            shown.append(picture)
        else:
            frames = draw_sample(rng, LAYOUT_BY_NAME[rng.choice(["clip-4", "clip-8", "clip-12"])]).pictures
            data = tuple(encode_png(frame) for frame in frames)
            parts.append(MediaItem("video", b"", MediaOptions(fps=FPS), frames=data))
            shown.append(frames)
    return Asked(parts, shown)


class Reference:
    """Hugging Face in float32, with the patches of its own processors."""

    def __init__(self) -> None:
        self._model = Qwen3VLForConditionalGeneration.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
        self._pictures = Qwen2VLImageProcessorPil.from_pretrained(DEMO_CHECKPOINT)
        self._clips = ClipReference(DEMO_CHECKPOINT, self._pictures, self._tokenizer)

    def greedy(self, asked: Asked) -> list[int]:
        kinds = {bytes: "image", MediaItem: "video"}
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": kinds[type(p)]} for p in asked.parts]
        chat = [{"role": "user", "content": content}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        pixels: dict[str, list[torch.Tensor]] = {}
        for shown in asked.shown:
            if isinstance(shown, list):
                clip, made = self._clips.inputs(shown, FPS)
                text = text.replace("<|video_pad|>", clip.replace("<|video_pad|>", "<|clip_row|>"), 1)
            else:
                made = dict(self._pictures([shown], return_tensors="pt"))
                rows = int(made["image_grid_thw"].prod()) // 4
                text = text.replace("<|image_pad|>", "<|picture_row|>" * rows, 1)
            for name, value in made.items():
                pixels.setdefault(name, []).append(value)
        text = text.replace("<|clip_row|>", "<|video_pad|>").replace("<|picture_row|>", "<|image_pad|>")
        ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        config = self._model.config
        types = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=types,
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                **{name: torch.cat(values) for name, values in pixels.items()},
            )
        return list(out[0, ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def expected() -> Iterator[list[tuple[Asked, list[int]]]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reference, rng = Reference(), random.Random(17)
    drawn = [draw(rng) for _ in range(NUM_PROMPTS)]
    yield [(asked, reference.greedy(asked)) for asked in drawn]
    torch.set_num_threads(threads)


@pytest.mark.parametrize("variant", VARIANTS)
def test_clips_and_pictures_in_one_prompt_give_the_references_tokens(
    expected: list[tuple[Asked, list[int]]], variant: str
) -> None:
    """Invariant 17: main features and every DeepStack level in prompt order, for clips and pictures mixed."""
    with running_engine(**VARIANTS[variant]) as driver:
        replies = driver.ask_all([asked.parts for asked, _ in expected], MAX_TOKENS)
        assert [reply.tokens for reply in replies] == [tokens for _, tokens in expected]
        again = driver.ask_all([asked.parts for asked, _ in expected], MAX_TOKENS)
        assert [reply.tokens for reply in again] == [tokens for _, tokens in expected]
        assert not any(reply.usage.prefilled_media_tokens for reply in again)
        for reply, (asked, _) in zip(replies, expected, strict=True):
            clips = [shown for shown in asked.shown if isinstance(shown, list)]
            assert reply.usage.clip_frames == sum(map(len, clips))
            assert reply.usage.lowered_clips == 0


def test_a_clip_that_is_too_large_for_one_pass_goes_through_the_tower_frame_by_frame(
    expected: list[tuple[Asked, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "BLOCK_PATCHES", 80)
    assert vision._groups([36, 36, 48, 100, 4, 4]) == [
        (0, 72, [36, 36]),
        (72, 120, [48]),
        (120, 220, [100]),
        (220, 228, [4, 4]),
    ]
    with running_engine(engine__step_budget_ms=0.001) as driver:
        replies = driver.ask_all([asked.parts for asked, _ in expected], MAX_TOKENS)
    assert [reply.tokens for reply in replies] == [tokens for _, tokens in expected]


def test_a_hit_that_ends_inside_a_clip_goes_on_at_that_row() -> None:
    """Invariant 7, for rows that lie in several spans: the pages of the clip's end have gone to somebody else."""
    frames = tuple(encode_png(frame) for frame in draw_sample(random.Random(5), LAYOUT_BY_NAME["clip-12"]).pictures)
    clip = MediaItem("video", b"", MediaOptions(fps=FPS), frames=frames)
    with running_engine(num_pages=14) as driver:
        whole = driver.ask([clip, "Describe the video."], MAX_TOKENS)
        driver.ask([" ".join(map(str, range(40)))], MAX_TOKENS, ignore_eos=True)
        partly = driver.ask([clip, "Describe the video."], MAX_TOKENS)
        assert 0 < partly.usage.cached_media_tokens < 72
        assert partly.usage.cached_media_tokens + partly.usage.prefilled_media_tokens == 72
        assert partly.tokens == whole.tokens


def test_rows_of_a_clip_whose_features_follow_each_other_are_gathered_as_one() -> None:
    clip, picture = (ItemKey(content_id("video", data), bytes(32)) for data in (b"c", b"p"))
    media = (
        MediaRows(0, 9, clip, 0),
        MediaRows(12, 9, clip, 9),
        MediaRows(24, 4, clip, 18),
        MediaRows(30, 9, picture, 0),
        MediaRows(40, 9, clip, 0),
        MediaRows(50, 9, clip, 18),  # not the frame after
    )
    joined = [(part.count, part.key, part.offset) for part in _joined(media)]
    assert joined == [(22, clip, 0), (9, picture, 0), (9, clip, 0), (9, clip, 18)]
    rows = np.concatenate([np.arange(part.offset, part.offset + part.count) for part in media])
    gathered = np.concatenate([np.arange(offset, offset + count) for count, _, offset in joined])
    np.testing.assert_array_equal(rows, gathered)


def test_the_largest_item_of_a_rehearsal_is_a_clip_where_no_picture_is_as_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rehearsal, "MAX_STEP_PATCHES", 64)
    with running_engine(num_pages=16) as driver:
        runner = driver.engine._parts.executor
        assert isinstance(runner, Runner)
        seen: list[tuple[tuple[int, int, int], tuple[int, ...]]] = []
        stage = runner.stage

        def watched(key: ItemKey, patches: Patches) -> None:
            seen.append((patches.grid, patches.pixels.shape))
            stage(key, patches)

        monkeypatch.setattr(runner, "stage", watched)
        steps = rehearsal.Rehearsal(runner, RunnerLimits(4, 8, 64), 16, 16)
        for num_tokens in (16, 50):
            assert not steps.encode(num_tokens).failed_items
        steps.forget()
    assert seen == [((1, 2, 32), (64, 3, 1, 16, 16)), ((4, 2, 26), (208, 3, 2, 16, 16))]


def test_frames_that_repeat_those_before_are_encoded_once_when_asked_for_and_give_the_same_answer() -> None:
    """A still clip: of six pairs of frames, four are those before."""
    first, *_, last = draw_sample(random.Random(8), LAYOUT_BY_NAME["clip-12"]).pictures
    frames = tuple(encode_png(picture) for picture in [first] * 6 + [last] * 6)
    clip = MediaItem("video", b"", MediaOptions(fps=FPS), frames=frames)
    answers, grids = [], []
    for share in (False, True):
        with running_engine(media__share_repeated_frames=share) as driver:
            facts = driver.engine.media.describe(clip)
            patches = driver.engine.media.materialise(clip, facts).result(60).patches
            grids.append((patches.grid, patches.stored_grid, len(patches.pixels)))
            reply = driver.ask([clip, "Describe the video."], MAX_TOKENS)
            answers.append((reply.tokens, reply.usage.prefilled_media_tokens))
    assert grids == [((6, 6, 8), (6, 6, 8), 288), ((6, 6, 8), (2, 6, 8), 96)]
    assert answers[0] == answers[1]
    assert answers[0][1] == 72
