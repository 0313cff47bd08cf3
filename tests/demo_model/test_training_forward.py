"""The trainer's forward is Hugging Face's, and its rows are what the chat template writes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write_tiny_template
from torch import Tensor
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from prism_server.demo_model import LAYOUT_BY_NAME, LAYOUTS, Layout, Turn, checkpoint_dir
from prism_server.demo_model.training.batches import Batch, draw_batch, sizes_of
from prism_server.demo_model.training.learner import initial_weights
from prism_server.demo_model.training.network import Network
from prism_server.demo_model.training.objective import answer_loss, cell_loss, initial_heads
from prism_server.demo_model.training.prompts import NOTHING_ASKED, SYSTEM_PROMPT, PromptWriter
from prism_server.model.config import ModelConfig
from prism_server.model.loader import expected_shapes

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
PATCH, MERGED = 16, 32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_template(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Qwen3VLForConditionalGeneration:
    """With weights so large that every part of the model matters."""
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(directory)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * (1.0 if "embed" in name else parameter[0].numel() ** -0.5))
            else:
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + 0.1 * noise)
    return model


def flat_patches(frames: Tensor) -> Tensor:
    """uint8 [2, height, width, 3] -> [patches, 3 * 2 * 16 * 16], by the order that the processor documents."""
    _, height, width, _ = frames.shape
    values = frames.float() / 127.5 - 1
    patches = []
    for top in range(0, height, MERGED):
        for left in range(0, width, MERGED):
            for y in (top, top + PATCH):
                for x in (left, left + PATCH):
                    patches.append(values[:, y : y + PATCH, x : x + PATCH].permute(3, 0, 1, 2).flatten())
    return torch.stack(patches)


def reference_media(layout: Layout, batch: Batch) -> dict[str, Any]:
    """The pixels of all rows, in order, as Hugging Face takes them."""
    if not layout.slots:
        return {}
    sizes = sizes_of(layout)
    shown = [
        batch.pictures[sizes.index(slot)][batch.shown[row, number]].expand(2, -1, -1, -1)
        for row in range(len(batch.ids))
        for number, slot in enumerate(layout.slots)
    ]
    pixels = torch.cat([flat_patches(frames) for frames in shown])
    grids = [[1, slot.height // PATCH, slot.width // PATCH] for slot in layout.slots]
    if layout.kind == "clip":
        clip = torch.tensor([[len(layout.slots), *grids[0][1:]]] * len(batch.ids))
        return {"pixel_values_videos": pixels, "video_grid_thw": clip}
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids * len(batch.ids))}


@every_layout
def test_logits_and_positions_equal_the_references(
    layout: Layout, directory: Path, reference: Qwen3VLForConditionalGeneration
) -> None:
    config = ModelConfig.from_dir(directory)
    state = reference.state_dict()
    weights = {name: state[name] for name in expected_shapes(config)}
    writer = PromptWriter(directory)
    batch, _ = draw_batch(random.Random(layout.name), writer, layout, 2, {})
    media = reference_media(layout, batch)
    kinds = torch.where(batch.ids == reference.config.image_token_id, 1, 0)
    kinds[batch.ids == reference.config.video_token_id] = 2
    grids = {name: grid for name, grid in media.items() if name.endswith("grid_thw")}
    positions, _ = reference.model.get_rope_index(batch.ids, kinds, attention_mask=torch.ones_like(batch.ids), **grids)
    assert torch.equal(positions, batch.positions)
    with torch.no_grad():
        expected = reference(input_ids=batch.ids, position_ids=batch.positions, use_cache=False, **media).logits
        actual = Network(config, weights, torch.float32)(batch).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_bfloat16_products_change_the_loss_little_and_reach_every_weight(directory: Path) -> None:
    """The types that meet on a GPU, on the CPU."""
    config = ModelConfig.from_dir(directory)
    generator = torch.Generator().manual_seed(1)
    weights = initial_weights(expected_shapes(config), torch.device("cpu"), generator)
    heads = initial_heads(config.text.hidden_size, torch.device("cpu"))
    for parameter in (*weights.values(), *heads.values()):
        parameter.requires_grad_(True)
    writer = PromptWriter(directory)
    layouts = [LAYOUT_BY_NAME[name] for name in ("scenes-2-mixed", "page-224x288", "clip-4", "text")]
    for layout in layouts:
        batch, _ = draw_batch(random.Random(3), writer, layout, 2, {})
        exact, rounded = (Network(config, weights, dtype)(batch) for dtype in (torch.float32, torch.bfloat16))
        assert rounded.logits.dtype == torch.bfloat16
        losses = [answer_loss(batch, output) + cell_loss(batch, output, heads) for output in (exact, rounded)]
        torch.testing.assert_close(losses[1], losses[0], rtol=0.01, atol=0.01)
        losses[1].backward()
    for name, parameter in {**weights, **heads}.items():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("with_system", [False, True])
@pytest.mark.parametrize("name", ["text", "scene-96", "scenes-3", "pages-2-mixed"])
def test_a_row_is_what_the_chat_template_writes(name: str, with_system: bool) -> None:
    layout = LAYOUT_BY_NAME[name]
    turns = [Turn("color", "What color is the star?", "red"), Turn("read", "Read the page.", "INVOICE 12\nTotal 3.50")]
    content: list[dict[str, str]] = [{"type": "image"} for _ in layout.slots]
    chat: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM_PROMPT}] if with_system else []
    for turn in turns:
        chat.append({"role": "user", "content": [*content, {"type": "text", "text": turn.question}]})
        chat.append({"role": "assistant", "content": turn.answer})
        content = []
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir())
    before, *rest = tokenizer.apply_chat_template(chat, tokenize=False).split("<|image_pad|>")
    text = before + "".join(
        "<|image_pad|>" * slot.num_tokens + part for slot, part in zip(layout.slots, rest, strict=True)
    )
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    row = PromptWriter(checkpoint_dir()).row(layout, with_system, turns)
    assert row.num_turns == 2
    written = row.ids[: len(expected) - 1].tolist()  # the last line break would come before the next question
    assert written == expected[:-1]
    assert set(row.ids[len(expected) - 1 :]) == {tokenizer.pad_token_id}
    for number, turn in enumerate(turns):
        targets = row.targets[row.turn_of == number]
        assert tokenizer.decode(targets) == f"{turn.answer}<|im_end|>"
        assert targets.tolist() == row.ids[1:][row.turn_of[:-1] == number].tolist()
    assert (row.targets[row.turn_of == -1] == NOTHING_ASKED).all()


def test_turns_that_have_no_room_are_left_out_and_a_first_one_is_refused() -> None:
    writer, layout = PromptWriter(checkpoint_dir()), LAYOUT_BY_NAME["text"]
    short, long = Turn("sum", "What is 1 plus 1?", "2"), Turn("repeat", "Repeat", "zo " * 100)
    assert writer.row(layout, False, [short, long, short]).num_turns == 1
    with pytest.raises(ValueError, match="no room"):
        writer.row(layout, False, [long])
