"""Ids and positions against transformers, over generated conversations."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from prism_server.identity import Digest
from prism_server.media.item import ItemFacts, ItemKey, MediaItem
from prism_server.media.messages import MediaContent, Message, TextContent
from prism_server.prompt.encoded import EncodedPrompt, MediaSpan
from prism_server.prompt.positions import mrope_positions

NUM_CONVERSATIONS = 200
WORDS = [
    *(
        "What",
        "is",
        "on",
        "page",
        "3",
        "2024-05-17",
        "the",
        "quick",
        "fox",
        "it's",
        "WE'LL",
        "12.50",
        "€",
        "a<b",
        "x > y",
    ),
    *(
        "<table>",
        "</td>",
        "<",
        "<|",
        "|>",
        "你好",
        "世界",
        "Съешь",
        "булок",
        "مرحبا",
        "😀",
        "👩‍👩‍👧",
        "é",
        "e\u0301",
        "ﬁ",
    ),
    *("\n", "\n\n", "\r\n", "  ", "\t", "\u3000", "{}", '{"a": 1}', "…", "_", "#", "𠜎"),
]


def random_text(rng: random.Random) -> str:
    glue = rng.choice(["", " ", " ", "\n"])
    return glue.join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))


def random_parts(rng: random.Random, sizes: list[tuple[int, int]]) -> list[dict[str, str]]:
    """Text, one picture, several, text-picture-text, picture-text-picture and whatever else comes up."""
    shape = rng.choice(["t", "i", "it", "ti", "tit", "iti", "iit", "iiiit", "ttit", "titit"])
    parts: list[dict[str, str]] = []
    for letter in shape:
        if letter == "t":
            parts.append({"type": "text", "text": random_text(rng)})
        else:
            sizes.append((rng.randint(1, 6) * 32, rng.randint(1, 6) * 32))
            parts.append({"type": "image"})
    return parts


def random_conversation(rng: random.Random) -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    """Messages as transformers takes them, and the pixel sizes of their pictures."""
    sizes: list[tuple[int, int]] = []
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": random_text(rng)})
    for turn in range(rng.randint(1, 3)):
        if turn:
            messages.append({"role": "assistant", "content": random_text(rng)})
        content = random_text(rng) if rng.random() < 0.2 else random_parts(rng, sizes)
        messages.append({"role": "user", "content": content})
    return messages, sizes


def ours(messages: list[dict[str, Any]]) -> list[Message]:
    """The same messages in Prism's types."""
    converted: list[Message] = []
    index = 0
    for message in messages:
        parts: list[TextContent | MediaContent] = []
        content = message["content"]
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if part["type"] == "text":
                parts.append(TextContent(part["text"]))
            else:
                parts.append(MediaContent(index, "image"))
                index += 1
        converted.append(Message(message["role"], tuple(parts)))
    return converted


def reference_ids(tokenizer: Any, messages: list[dict[str, Any]], num_tokens: list[int]) -> list[int]:
    """Render, repeat each placeholder as often as its picture has tokens (as Qwen3VLProcessor does), encode."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, *tails = text.split("<|image_pad|>")
    assert len(tails) == len(num_tokens)
    expanded = head + "".join("<|image_pad|>" * n + tail for n, tail in zip(num_tokens, tails, strict=True))
    ids: list[int] = tokenizer(expanded)["input_ids"]
    return ids


def facts_of(sizes: list[tuple[int, int]]) -> list[ItemFacts]:
    key = ItemKey(b"c" * 32, b"l" * 32)
    return [ItemFacts(key, "image", (1, h // 16, w // 16), h * w // 1024, w, h) for h, w in sizes]


def encode(encoder: Any, messages: list[dict[str, Any]], sizes: list[tuple[int, int]]) -> EncodedPrompt:
    prompt: EncodedPrompt = encoder.encode_chat(ours(messages), facts_of(sizes), [MediaItem("image", b"")] * len(sizes))
    return prompt


def test_ids_equal_the_reference_for_generated_conversations(checkpoint: Path, make_encoder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoder = make_encoder(checkpoint)
    rng = random.Random(20)
    for _ in range(NUM_CONVERSATIONS):
        messages, sizes = random_conversation(rng)
        expected = reference_ids(tokenizer, messages, [h * w // 1024 for h, w in sizes])
        assert encode(encoder, messages, sizes).token_ids.tolist() == expected, messages


def test_ids_equal_the_reference_with_tools_calls_and_results(released_style_dir: Path, make_encoder: Any) -> None:
    parameters = {"type": "object", "properties": {"city <name>": {"type": "string", "description": "ä < ö & 'x'"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": {"city <name>": "Köln <3"}}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?\n"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "\nrain, 7 °C < 8 °C"},
    ]
    tokenizer = AutoTokenizer.from_pretrained(released_style_dir)
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert "<tool_call>" in text
    converted = [
        Message(m["role"], (TextContent(m["content"]),), {k: m[k] for k in ("tool_calls",) if k in m})  # type: ignore[arg-type]
        for m in messages
    ]
    prompt = make_encoder(released_style_dir).encode_chat(converted, tools=tools)
    assert prompt.token_ids.tolist() == tokenizer(text)["input_ids"]


def test_plain_text_ids_equal_the_reference(checkpoint: Path, make_encoder: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoder = make_encoder(checkpoint)
    rng = random.Random(3)
    for _ in range(100):
        text = random_text(rng)
        assert encoder.encode_text(text).token_ids.tolist() == tokenizer(text)["input_ids"], text


@pytest.fixture(scope="module")
def reference_model(released_style_dir: Path) -> Qwen3VLModel:
    """Positions need its code and config only, so its weights stay on the meta device."""
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 1, "out_hidden_size": 16}
    text = {**tiny, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 32}
    with torch.device("meta"):
        return Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]}))


def test_positions_equal_the_reference_for_generated_conversations(
    make_encoder: Any, reference_model: Qwen3VLModel
) -> None:
    encoder = make_encoder()
    image_pad = encoder.tokenizer.media_tokens.image_pad
    rng = random.Random(21)
    for _ in range(NUM_CONVERSATIONS):
        messages, sizes = random_conversation(rng)
        prompt = encode(encoder, messages, sizes)
        ids = torch.from_numpy(prompt.token_ids.astype(np.int64))[None]
        grids = torch.tensor([facts.grid for facts in facts_of(sizes)]) if sizes else None
        expected, delta = reference_model.get_rope_index(ids, (ids == image_pad).int(), image_grid_thw=grids)
        np.testing.assert_array_equal(prompt.positions, expected[:, 0].numpy())
        assert prompt.delta == delta.item()
        assert prompt.positions.dtype == np.int32


def test_positions_of_a_clip_beside_a_picture_equal_the_reference(reference_model: Qwen3VLModel) -> None:
    """Each frame of a clip is a span of its own; time is told by the text between them."""
    picture = ItemFacts(ItemKey(b"p" * 32, b"l" * 32), "image", (1, 4, 8), 8, 128, 64)
    clip = ItemFacts(ItemKey(b"c" * 32, b"l" * 32), "video", (3, 6, 4), 18, 64, 96)
    kinds = [0] * 3 + [1] * 8 + [0] * 5 + [2] * 6 + [0] * 2 + [2] * 6 + [0] * 2 + [2] * 6 + [0] * 4
    spans = [MediaSpan(3, 8, 12, 0, picture)]
    spans += [MediaSpan(16 + i * 8, 6, 23 + i * 8, 1, clip, item_offset=i * 6) for i in range(3)]
    positions, delta = mrope_positions(len(kinds), spans)
    expected, expected_delta = reference_model.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds], dtype=torch.int32),
        image_grid_thw=torch.tensor([picture.grid]),
        video_grid_thw=torch.tensor([clip.grid]),
    )
    np.testing.assert_array_equal(positions, expected[:, 0].numpy())
    assert delta == expected_delta.item()


def test_a_span_that_is_not_one_frame_is_an_error() -> None:
    facts = ItemFacts(ItemKey(Digest(32), Digest(32)), "image", (1, 4, 4), 4, 64, 64)
    with pytest.raises(ValueError, match="not a frame"):
        mrope_positions(10, [MediaSpan(2, 3, 6, 0, facts)])
    oblong = ItemFacts(ItemKey(Digest(32), Digest(32)), "image", (1, 4, 4), 8, 64, 64)
    with pytest.raises(ValueError, match="cannot be 8 tokens"):
        mrope_positions(10, [MediaSpan(2, 8, 10, 0, oblong)])
