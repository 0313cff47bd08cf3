"""The bundled model answers what the generator draws: both belong together."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from prism_server.demo_model import LAYOUTS, Sample, checkpoint_dir, draw_sample

SAMPLES_EACH = 3
SHORT_ANSWER = 24
"""Characters; long answers ("Read the page.") only cost time here."""


@pytest.fixture(scope="module")
def model() -> Iterator[Qwen3VLForConditionalGeneration]:
    """On one thread: on a shared machine more of them wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Qwen3VLForConditionalGeneration.from_pretrained(checkpoint_dir(), dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def reference_answer(model: Qwen3VLForConditionalGeneration, sample: Sample, question: str) -> str:
    """Hugging Face's greedy answer to one question about a sample's pictures."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    content = [{"type": "image"} for _ in sample.pictures] + [{"type": "text", "text": question}]
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    inputs = {}
    if sample.pictures:
        processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint_dir())
        inputs = dict(processor(sample.pictures, return_tensors="pt"))
        before, *rest = text.split("<|image_pad|>")
        tokens = [int(grid.prod()) // 4 for grid in inputs["image_grid_thw"]]
        text = before + "".join("<|image_pad|>" * n + part for n, part in zip(tokens, rest, strict=True))
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    types = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=types,
            max_new_tokens=40,
            do_sample=False,
            **inputs,
        )
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_the_bundled_model_answers_what_the_generator_draws(model: Qwen3VLForConditionalGeneration) -> None:
    wrong, asked = [], 0
    for layout in LAYOUTS:
        if layout.kind == "clip":  # the reference needs torchvision for clips
            continue
        rng = random.Random(layout.name)
        for _ in range(SAMPLES_EACH):
            sample = draw_sample(rng, layout)
            turn = next(turn for turn in sample.turns if len(turn.answer) <= SHORT_ANSWER)
            answer = reference_answer(model, sample, turn.question)
            asked += 1
            if answer != turn.answer:
                wrong.append((layout.name, turn, answer))
    assert len(wrong) <= 0.15 * asked, wrong
