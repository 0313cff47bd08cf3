"""What Hugging Face answers to the prompts that engines are asked: ids, pixels, tokens and logits of its own."""

from __future__ import annotations

import io
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engine_support import Parts
from PIL import Image
from reference import DEMO_CHECKPOINT, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from prism_server.demo_model import LAYOUT_BY_NAME, LAYOUTS, Sample, draw_sample, encode_jpeg, encode_png

IMAGE_PAD = "<|image_pad|>"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "generation_config.json",
)


class Reference:
    """A checkpoint directory in float32, on whatever prompts of text and pictures it is given."""

    def __init__(self, directory: Path) -> None:
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._processor = Qwen2VLImageProcessorPil.from_pretrained(directory)

    def inputs(self, parts: Parts) -> dict[str, Tensor]:
        """A user's message as the model's forward takes it."""
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
        chat = [{"role": "user", "content": content}]
        text = self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        pictures = [Image.open(io.BytesIO(part)).convert("RGB") for part in parts if isinstance(part, bytes)]
        pixels: dict[str, Tensor] = dict(self._processor(pictures, return_tensors="pt")) if pictures else {}
        head, *tails = text.split(IMAGE_PAD)
        tokens = [int(grid.prod()) // 4 for grid in pixels.get("image_grid_thw", ())]
        text = head + "".join(IMAGE_PAD * n + tail for n, tail in zip(tokens, tails, strict=True))
        ids = self._tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return {"input_ids": ids, **pixels}

    def greedy(self, parts: Parts, max_tokens: int, *, ignore_eos: bool = False, **options: Any) -> list[int]:
        """The tokens of greedy decoding with the reference's own cache, the end token included."""
        inputs = self.inputs(parts)
        ids = inputs["input_ids"]
        with torch.inference_mode():
            out = self.model.generate(
                **inputs,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=self._types(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                **({"eos_token_id": -1} if ignore_eos else {}),
                **options,
            )
        return list(out[0, ids.shape[1] :].tolist())

    def logits(self, parts: Parts, token_ids: Sequence[int]) -> Tensor:
        """float32 [len(token_ids), vocabulary]: what each answer token was chosen from, given those before."""
        inputs = self.inputs(parts)
        ids = torch.cat([inputs.pop("input_ids"), torch.tensor([list(token_ids[:-1])], dtype=torch.int64)], dim=1)
        with torch.inference_mode():
            out = self.model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=self._types(ids),
                logits_to_keep=len(token_ids),
                **inputs,
            )
        logits: Tensor = out.logits[0]
        return logits.float()

    def _types(self, ids: Tensor) -> Tensor:
        return (ids == self.model.config.image_token_id).int()


def save_tiny_checkpoint(kind: str, directory: Path, seed: int = 0) -> None:
    """A random model of `tiny_config(kind)`'s shapes that speaks the demo model's vocabulary, with its tokenizer."""
    demo: Any = Qwen3VLForConditionalGeneration.config_class.from_pretrained(DEMO_CHECKPOINT)
    config = tiny_config(kind)
    config.text_config.vocab_size = demo.text_config.vocab_size
    for name in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        setattr(config, name, getattr(demo, name))
    tiny_model(kind, seed, config).save_pretrained(directory)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_CHECKPOINT / name, directory)


# -- prompts ---------------------------------------------------------------------------------------------------------


def draw_prompts(seed: int, count: int, most_vision_tokens: int = 640) -> list[Parts]:
    """Text, one picture, several pictures of several sizes, and text and pictures in any order; some share pictures."""
    rng = random.Random(seed)
    layouts = [one for one in LAYOUTS if one.kind != "clip" and one.vision_tokens <= most_vision_tokens]
    prompts: list[Parts] = []
    while len(prompts) < count:
        layout = rng.choices(layouts, [1 if layout.vision_tokens > 200 else 6 for layout in layouts])[0]
        sample = draw_sample(rng, layout)
        pictures = encoded(rng, sample)
        for turn in rng.sample(sample.turns, min(len(sample.turns), rng.randint(1, 3))):
            prompts.append(interleaved(rng, pictures, turn.question))
    return prompts[:count]


def encoded(rng: random.Random, sample: Sample) -> list[bytes]:
    encode = encode_png if rng.random() < 0.8 else encode_jpeg
    return [encode(picture) for picture in sample.pictures]


def interleaved(rng: random.Random, pictures: Sequence[bytes], question: str) -> Parts:
    """Mostly pictures first, as the demo model knows it; else the question anywhere, and words between pictures."""
    draw = rng.random()
    if draw < 0.6 or not pictures:
        return (*pictures, question)
    if draw < 0.8:
        place = rng.randint(0, len(pictures))
        return (*pictures[:place], question, *pictures[place:])
    parts: list[str | bytes] = []
    for number, picture in enumerate(pictures, 1):
        parts += [f"Picture {number}: ", picture]
    return (*parts, question)


def small_pictures(seed: int, count: int, layout: str = "scene-96") -> list[bytes]:
    """Encoded pictures of one size, each different."""
    rng = random.Random(seed)
    return [encode_png(draw_sample(rng, LAYOUT_BY_NAME[layout]).pictures[0]) for _ in range(count)]
