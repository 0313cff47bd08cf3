"""The references that tests compare with: tiny Hugging Face models of Qwen3-VL's shapes, and steps over their twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from prism_server.capacity.page_layout import KVDtype
from prism_server.model import FeatureRows, Features, Qwen3VL
from prism_server.ops import AttentionBatch, PagedKV

DEMO_CHECKPOINT = Path(__file__).parents[1] / "prism_server" / "demo_model" / "checkpoint"
PATCH = 16
IMAGE, VIDEO, START, END = 90, 91, 92, 93
"""Special ids of the tiny models, whose vocabulary is 96."""


def tiny_config(kind: str) -> Qwen3VLConfig:
    """`2b`: vision heads of 64, tied head. `8b`: vision heads of 72, untied head, deeper DeepStack."""
    big = kind == "8b"
    return Qwen3VLConfig(
        text_config={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 8 if big else 4,
            "num_key_value_heads": 2,
            "head_dim": 32 if big else 128,
            "vocab_size": 96,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [6, 5, 5] if big else [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 5 if big else 4,
            "hidden_size": 144 if big else 128,
            "intermediate_size": 100,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 81,
            "deepstack_visual_indexes": [1, 2, 4] if big else [0, 1, 2],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=not big,
    )


def tiny_model(kind: str, seed: int = 0, config: Qwen3VLConfig | None = None) -> Qwen3VLForConditionalGeneration:
    """Random weights of a size that keeps activations near one: errors then show, as they would in a trained model."""
    config = config or tiny_config(kind)
    config._attn_implementation = "eager"
    model = Qwen3VLForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)  # it may be the head as well
            elif "pos_embed" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
    return model


def demo_model() -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration.from_pretrained(
        DEMO_CHECKPOINT, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def random_pixels(grid: tuple[int, int, int], frames: int, seed: int = 0) -> Tensor:
    """Patches as the processor hands them over: uint8 [n, 3, frames, 16, 16]."""
    t, h, w = grid
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (t * h * w, 3, frames, PATCH, PATCH), generator=generator, dtype=torch.uint8)


def pixel_values(pixels: Tensor) -> Tensor:
    """The same patches as the reference takes them: float32 [n, 3 * 2 * 16 * 16], mean and deviation 0.5."""
    return ((pixels.float() / 255 - 0.5) / 0.5).expand(-1, -1, 2, -1, -1).flatten(1)


@dataclass
class Prompt:
    """Token ids with pictures among them, their pixels, and the reference's positions."""

    ids: list[int]
    grids: list[tuple[int, int, int]]
    pixels: list[Tensor] = field(repr=False)
    positions: Tensor = field(repr=False)
    media_rows: list[int] = field(repr=False)

    def reference_logits(self, model: Qwen3VLForConditionalGeneration, more_ids: Sequence[int] = ()) -> Tensor:
        """float32 [rows, vocab] for the prompt and `more_ids` after it."""
        with torch.no_grad():
            return (
                model(
                    input_ids=torch.tensor([[*self.ids, *more_ids]]),
                    pixel_values=torch.cat([pixel_values(p) for p in self.pixels]) if self.pixels else None,
                    image_grid_thw=torch.tensor(self.grids) if self.grids else None,
                    position_ids=self.positions_with(len(more_ids)).unsqueeze(1),
                )
                .logits[0]
                .float()
            )

    def positions_with(self, num_more: int) -> Tensor:
        """int64 [3, rows]: the prompt's, and those of rows that follow it."""
        following = int(self.positions.max()) + 1 + torch.arange(num_more)
        return torch.cat([self.positions, following.expand(3, -1)], dim=1)


def make_prompt(
    model: Qwen3VLForConditionalGeneration, grids: Sequence[tuple[int, int, int]], seed: int = 0, text_tokens: int = 7
) -> Prompt:
    """Some text, then each picture and some text after it; text ids below 80."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)

    def text() -> list[int]:
        return torch.randint(0, 80, (text_tokens,), generator=generator).tolist()

    ids, media_rows = text(), []
    for _, h, w in grids:
        ids.append(config.vision_start_token_id)
        media_rows += range(len(ids), len(ids) + h * w // 4)
        ids += [config.image_token_id] * (h * w // 4) + [config.vision_end_token_id] + text()
    kinds = torch.tensor([[int(token == config.image_token_id) for token in ids]])
    positions, _ = model.model.get_rope_index(
        torch.tensor([ids]), kinds, image_grid_thw=torch.tensor(list(grids)) if grids else None
    )
    pixels = [random_pixels(grid, 1, seed * 100 + i) for i, grid in enumerate(grids)]
    return Prompt(ids, list(grids), pixels, positions[:, 0], media_rows)


def encode(model: Qwen3VL, prompt: Prompt) -> Features | None:
    """All of a prompt's pictures, in order, as one run of feature rows."""
    if not prompt.grids:
        return None
    states = [model.vision.begin(pixels, grid) for pixels, grid in zip(prompt.pixels, prompt.grids, strict=True)]
    model.vision.advance(states, model.config.vision.depth)
    features = [model.vision.finish(state) for state in states]
    levels = zip(*((f.main, *f.deepstack) for f in features), strict=True)
    main, *deepstack = (torch.cat(level) for level in levels)
    return Features(main, tuple(deepstack))


class Session:
    """Several prompts over one page pool, their pages in random order, run in steps of any cut."""

    def __init__(
        self, model: Qwen3VL, prompts: Sequence[Prompt], page_tokens: int, kv_dtype: KVDtype, max_more: int = 8
    ) -> None:
        layout = model.config.page_layout(page_tokens, kv_dtype)
        counts = [layout.pages_for(len(prompt.ids) + max_more) for prompt in prompts]
        self.model = model
        self.prompts = prompts
        self.kv = PagedKV(layout, sum(counts), model.device)
        self.kv.payload.view(torch.uint8).fill_(0xFF)  # NaN in each of the types: what is not stored must not matter
        pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)).split(counts)
        self.tables = torch.zeros((len(prompts), max(counts)), dtype=torch.int32)
        for table, own in zip(self.tables, pages, strict=True):
            table[: len(own)] = own
        self.ids = [list(prompt.ids) for prompt in prompts]
        self.features = [encode(model, prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)

    def step(self, ends: dict[int, int]) -> Tensor:
        """Compute prompt i up to row ends[i]; logits float32 of all rows, prompts in order."""
        sequences = sorted(ends)
        spans = {s: range(self.computed[s], ends[s]) for s in sequences}
        device = self.model.device
        positions = [self.prompts[s].positions_with(len(self.ids[s])) for s in sequences]
        rows = [[(s, row) for row in spans[s]] for s in sequences]
        flat = [pair for part in rows for pair in part]
        page_tokens = self.kv.layout.page_tokens
        batch = attention_batch(
            self.tables[sequences].to(device),
            [len(spans[s]) for s in sequences],
            [ends[s] for s in sequences],
            page_tokens,
        )
        hidden = self.model.text.forward(
            torch.tensor([self.ids[s][row] for s, row in flat], device=device),
            torch.cat([p[:, spans[s].start : spans[s].stop] for s, p in zip(sequences, positions, strict=True)], 1).to(
                device
            ),
            self.kv,
            batch,
            self._media(flat),
        )
        self.computed = [ends.get(s, done) for s, done in enumerate(self.computed)]
        return self.model.text.logits(hidden).cpu()

    def _media(self, flat: list[tuple[int, int]]) -> FeatureRows | None:
        """The features whose rows are in this step, sliced out of their pictures."""
        places, levels = [], []
        for place, (s, row) in enumerate(flat):
            features = self.features[s]
            if features is not None and row in self.prompts[s].media_rows:
                index = self.prompts[s].media_rows.index(row)
                places.append(place)
                levels.append([level[index] for level in (features.main, *features.deepstack)])
        if not places:
            return None
        main, *deepstack = (torch.stack(level) for level in zip(*levels, strict=True))
        return FeatureRows(torch.tensor(places, device=self.model.device), main, tuple(deepstack))


def attention_batch(
    tables: Tensor, query_lens: Sequence[int], contexts: Sequence[int], page_tokens: int
) -> AttentionBatch:
    """The last query_lens[s] of contexts[s] rows of each sequence as one step; tables int32 [S, pages]."""
    starts, pages, slots = [0], [], []
    for table, query_len, context in zip(tables.tolist(), query_lens, contexts, strict=True):
        starts.append(starts[-1] + query_len)
        pages += [table[row // page_tokens] for row in range(context - query_len, context)]
        slots += [row % page_tokens for row in range(context - query_len, context)]
    device = tables.device
    return AttentionBatch.exact(
        tuple(starts),
        tuple(contexts),
        tables,
        torch.arange(len(contexts), dtype=torch.int32, device=device),
        torch.tensor(pages, dtype=torch.int64, device=device),
        torch.tensor(slots, dtype=torch.int64, device=device),
    )
