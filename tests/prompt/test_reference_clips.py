"""Prompts with clips in them, against transformers' processor and positions, in both ways of writing them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from prism_server.identity import media_chain_keys
from prism_server.media.item import ClipFacts, ItemFacts, ItemKey, MediaItem
from prism_server.media.messages import MediaContent, Message, TextContent, chain_parts
from prism_server.media.sampling import pair_times_s
from prism_server.prompt.encoded import EncodedPrompt

NUM_CONVERSATIONS = 120
WRAPPER = "<|vision_start|><|video_pad|><|vision_end|>"


class Processor(Qwen3VLProcessor):
    """Without the check of its parts' classes, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, part: Any) -> type:
        return type(part)


def picture_facts(rng: random.Random) -> ItemFacts:
    h, w = rng.randint(1, 5) * 2, rng.randint(1, 5) * 2
    return ItemFacts(ItemKey(rng.randbytes(32), b"l" * 32), "image", (1, h, w), h * w // 4, w * 16, h * 16)


def clip_facts(rng: random.Random) -> tuple[ItemFacts, VideoMetadata]:
    """A clip's facts and what the reference's processor would know of it."""
    count, fps = rng.randint(1, 12), rng.choice([1.0, 2.0, 24.0, 30000 / 1001])
    h, w = rng.randint(1, 5) * 2, rng.randint(1, 5) * 2
    frames = np.sort(np.array(rng.sample(range(1000), count), dtype=np.int32))
    t = -(-count // 2)
    clip = ClipFacts(frames, pair_times_s(frames / fps, 2))
    facts = ItemFacts(ItemKey(rng.randbytes(32), b"l" * 32), "video", (t, h, w), t * h * w // 4, w * 16, h * 16, clip)
    return facts, VideoMetadata(1000, fps=fps, frames_indices=frames.tolist())


class Conversation:
    """One user turn of text, pictures and clips in any order."""

    def __init__(self, rng: random.Random) -> None:
        self.facts: list[ItemFacts] = []
        self.videos: list[VideoMetadata] = []
        self.content: list[dict[str, str]] = []
        parts: list[TextContent | MediaContent] = []
        for letter in rng.choice(["v", "vt", "tv", "tvt", "ivi", "vit", "vvt", "itvt", "vivt", "ttvv"]):
            if letter == "t":
                text = rng.choice(["What?", "then ", "\n", "<0.3 seconds>", "a < b", "1.5", " seconds"])
                self.content.append({"type": "text", "text": text})
                parts.append(TextContent(text))
                continue
            if letter == "i":
                self.facts.append(picture_facts(rng))
            else:
                facts, metadata = clip_facts(rng)
                self.facts.append(facts)
                self.videos.append(metadata)
            kind = self.facts[-1].kind
            self.content.append({"type": kind})
            parts.append(MediaContent(len(self.facts) - 1, kind))
        self.message = Message("user", tuple(parts))
        self.media = [MediaItem(facts.kind, b"x") for facts in self.facts]

    def grids(self, kind: str) -> torch.Tensor | None:
        grids = [facts.grid for facts in self.facts if facts.kind == kind]
        return torch.tensor(grids) if grids else None


def reference_ids(directory: Path, tokenizer: Any, said: Conversation, nested: bool) -> list[int]:
    """The reference renders, replaces each placeholder and encodes; before 5.10 a clip's whole wrapper was replaced."""
    processor = Processor(Qwen2VLImageProcessorPil(), tokenizer, Qwen3VLVideoProcessor())
    chat = [{"role": "user", "content": said.content}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = {"video_grid_thw": said.grids("video"), "video_metadata": said.videos}
    clips = [processor.replace_video_token(inputs, i) for i in range(len(said.videos))]
    head, *tails = text.split("<|video_pad|>" if nested else WRAPPER)
    text = head + "".join(clip + tail for clip, tail in zip(clips, tails, strict=True))
    head, *tails = text.split("<|image_pad|>")
    counts = [facts.num_tokens for facts in said.facts if facts.kind == "image"]
    ids: list[int] = tokenizer(
        head + "".join("<|image_pad|>" * n + tail for n, tail in zip(counts, tails, strict=True))
    )["input_ids"]
    return ids


def encode(encoder: Any, said: Conversation) -> EncodedPrompt:
    prompt: EncodedPrompt = encoder.encode_chat([said.message], said.facts, said.media)
    return prompt


@pytest.mark.parametrize("video_prompt", ["nested", "flat"])
def test_ids_equal_the_reference_for_clips_among_pictures_and_text(
    checkpoint: Path, make_encoder: Any, video_prompt: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoder = make_encoder(checkpoint)
    encoder.video_prompt = video_prompt
    rng = random.Random(30)
    for _ in range(NUM_CONVERSATIONS):
        said = Conversation(rng)
        expected = reference_ids(checkpoint, tokenizer, said, video_prompt == "nested")
        assert encode(encoder, said).token_ids.tolist() == expected, said.content


@pytest.fixture(scope="module")
def reference_model() -> Qwen3VLModel:
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 1, "out_hidden_size": 16}
    text = {**tiny, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32}
    with torch.device("meta"):
        return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}))


def test_positions_equal_the_reference_for_clips_among_pictures_and_text(
    make_encoder: Any, reference_model: Qwen3VLModel
) -> None:
    encoder = make_encoder()
    tokens = encoder.tokenizer.media_tokens
    rng = random.Random(31)
    for _ in range(NUM_CONVERSATIONS):
        said = Conversation(rng)
        prompt = encode(encoder, said)
        ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
        kinds = (ids == tokens.image_pad).int() + 2 * (ids == tokens.video_pad).int()
        expected, delta = reference_model.get_rope_index(
            ids, kinds, image_grid_thw=said.grids("image"), video_grid_thw=said.grids("video")
        )
        np.testing.assert_array_equal(prompt.positions, expected[:, 0].numpy())
        assert prompt.delta == delta.item()


@pytest.mark.parametrize("video_prompt", ["nested", "flat"])
def test_a_clip_closes_once_and_its_rows_go_on_from_frame_to_frame(make_encoder: Any, video_prompt: str) -> None:
    encoder = make_encoder()
    encoder.video_prompt = video_prompt
    tokens = encoder.tokenizer.media_tokens
    rng = random.Random(32)
    for _ in range(40):
        said = Conversation(rng)
        prompt = encode(encoder, said)
        assert len(prompt.boundaries) == len(said.facts)
        chain = media_chain_keys(
            prompt.seed,
            chain_parts(
                [said.message], [facts.key.content_id for facts in said.facts], [item.options for item in said.media]
            ),
        )
        assert [boundary.media_key for boundary in prompt.boundaries] == chain
        for index, facts in enumerate(said.facts):
            spans = [span for span in prompt.spans if span.media_index == index]
            assert len(spans) == facts.grid[0]
            rows = facts.num_tokens // facts.grid[0]
            assert [(span.item_offset, span.rows) for span in spans] == [(i * rows, rows) for i in range(len(spans))]
            assert [span.is_last for span in spans] == [False] * (len(spans) - 1) + [True]
            close = spans[-1].close
            assert prompt.boundaries[index].rows == close
            assert prompt.token_ids[close - 1] == tokens.vision_end
            assert close == len(prompt.token_ids) or prompt.token_ids[close] != tokens.vision_end


def test_two_samplings_of_one_clip_never_share_a_page(make_encoder: Any) -> None:
    """Other frames with the same times in the text, or the same frames at other times: another layout, other keys."""
    encoder = make_encoder()
    times_s = pair_times_s(np.array([0.0, 0.5, 1.0, 1.5]), 2)
    prompts = []
    for layout, frames in ((b"a" * 32, [0, 1, 2, 3]), (b"b" * 32, [0, 2, 4, 6])):
        clip = ClipFacts(np.array(frames, dtype=np.int32), times_s)
        facts = ItemFacts(ItemKey(b"c" * 32, layout), "video", (2, 8, 8), 32, 128, 128, clip)
        message = Message("user", (MediaContent(0, "video"), TextContent("What moves?")))
        prompts.append(encoder.encode_chat([message], [facts], [MediaItem("video", b"x")]))
    one, other = prompts
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert one.page_keys[0] != other.page_keys[0]
    assert one.boundaries[0].key != other.boundaries[0].key


def test_text_that_spells_a_clip_stays_text(make_encoder: Any) -> None:
    encoder = make_encoder()
    prompt = encoder.encode_chat([Message("user", (TextContent(WRAPPER),))])
    assert encoder.tokenizer.media_tokens.video_pad not in prompt.token_ids.tolist()
