"""Qwen3-VL's forward for training: fixed shapes a layout, nothing that the host must wait for.

The weights are tensors under their released names, as Prism's loader gives and asks for them; Prism's own tables give
the places of patches and the angles of both rotations. So training needs no other implementation of the model; the
tests compare this one with Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.demo_model.layouts import Layout
from prism_server.demo_model.training.batches import Batch, sizes_of
from prism_server.model.config import ModelConfig
from prism_server.model.mrope import MRope
from prism_server.model.vision import LAYER_NORM_EPS
from prism_server.model.vision_grid import FrameTable

VISION, TEXT = "model.visual.", "model.language_model."


@dataclass(frozen=True, eq=False, slots=True)
class Output:
    """What one batch gives."""

    logits: Tensor = field(repr=False)
    """[B, length, vocab], in the type of the arithmetic."""
    features: tuple[Tensor, ...] = field(repr=False)
    """A size of the layout: float32 [P, tokens, hidden], the tower's main output for each picture."""


class Network:
    """The forward over float32 `weights`, which stay the caller's.

    Products and attention are done in `dtype`; the residual streams stay float32.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._config, self._weights, self._dtype = config, weights, dtype
        vision = config.vision
        device = weights[f"{TEXT}norm.weight"].device
        # The table of the identity: rows of weights that stretch the learned table, which is trained with the rest.
        identity = torch.eye(vision.num_position_embeddings, device=device)
        self._frames = FrameTable(identity, vision.merge_size, vision.head_dim, vision.rope_theta)
        self._rope = MRope(config.text, device)
        self._head = f"{TEXT}embed_tokens.weight" if config.text.tied_head else "lm_head.weight"

    def __call__(self, batch: Batch) -> Output:
        """Every size of picture is encoded once, each picture once."""
        weights = {name: weight.to(self._dtype) for name, weight in self._weights.items()}
        layout = batch.layout
        levels = [self._encode(weights, pictures) for pictures in batch.pictures]
        media = _gather(layout, batch.shown, levels) if levels else ()
        hidden = self._decode(weights, batch, media)
        return Output(F.linear(hidden, weights[self._head]), tuple(main for main, *_ in levels))

    def _encode(self, weights: Mapping[str, Tensor], pixels: Tensor) -> list[Tensor]:
        """uint8 [P, frames, height, width, 3] -> main and DeepStack levels, each float32 [P, tokens, hidden]."""
        config = self._config.vision
        tower = _Part(weights, VISION)
        frame = self._frames.get(pixels.shape[2] // config.patch_size, pixels.shape[3] // config.patch_size)
        cos, sin = frame.cos.to(self._dtype), frame.sin.to(self._dtype)
        patch = weights[f"{VISION}patch_embed.proj.weight"]
        if pixels.shape[1] == 1:  # a picture stands for every frame of its patches
            patch = patch.sum(2, keepdim=True)
        patches = patchify(pixels, config.patch_size, config.merge_size).to(self._dtype)
        places = frame.places @ self._weights[f"{VISION}pos_embed.weight"]
        hidden = F.linear(patches, patch.flatten(1), weights[f"{VISION}patch_embed.proj.bias"]) + places
        levels = []
        for index in range(config.depth):
            hidden = self._vision_block(tower.inside(f"blocks.{index}."), hidden, cos, sin)
            if index in config.deepstack_blocks:
                level = config.deepstack_blocks.index(index)
                levels.append(self._merge(tower.inside(f"deepstack_merger_list.{level}."), hidden))
        return [self._merge(tower.inside("merger."), hidden), *levels]

    def _vision_block(self, block: _Part, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self._config.vision.num_heads
        normed = block.layer_norm(hidden, "norm1").to(self._dtype)
        q, k, v = (
            block.linear(normed, "attn.qkv").view(*normed.shape[:2], 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        )
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        hidden = hidden + block.linear(attended.transpose(1, 2).flatten(2), "attn.proj")
        normed = block.layer_norm(hidden, "norm2").to(self._dtype)
        inner = F.gelu(block.linear(normed, "mlp.linear_fc1"), approximate="tanh")
        return hidden + block.linear(inner, "mlp.linear_fc2")

    def _merge(self, merger: _Part, hidden: Tensor) -> Tensor:
        """Groups of patches to tokens: [P, patches, width] -> float32 [P, tokens, hidden]."""
        group = self._config.vision.merge_size**2 * hidden.shape[-1]
        width = merger["norm.bias"].shape[0]
        normed = merger.layer_norm(hidden.reshape(-1, width), "norm").to(self._dtype).view(hidden.shape[0], -1, group)
        return merger.linear(F.gelu(merger.linear(normed, "linear_fc1")), "linear_fc2").float()

    def _decode(self, weights: Mapping[str, Tensor], batch: Batch, media: tuple[Tensor, ...]) -> Tensor:
        """-> [B, length, hidden] after the last norm. `media`: features and DeepStack levels of the media rows."""
        config = self._config.text
        text = _Part(weights, TEXT)
        num_rows, length = batch.ids.shape
        rows = batch.media_rows.flatten()
        cos, sin = (
            angles.to(self._dtype).view(num_rows, length, 1, -1) for angles in self._rope(batch.positions.flatten(1))
        )
        hidden = F.embedding(batch.ids.flatten(), self._weights[f"{TEXT}embed_tokens.weight"])
        if media:
            hidden = hidden.index_copy(0, rows, media[0])
        for index in range(config.num_layers):
            layer = text.inside(f"layers.{index}.")
            hidden = self._decoder_layer(layer, hidden.view(num_rows, length, -1), cos, sin).flatten(0, 1)
            if index + 1 < len(media):
                hidden = hidden.index_add(0, rows, media[index + 1])
        normed = text.rms_norm(hidden, "norm", config.rms_norm_eps).to(self._dtype)
        return normed.view(num_rows, length, -1)

    def _decoder_layer(self, layer: _Part, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """float32 [B, length, hidden] -> the same after attention and MLP."""
        config = self._config.text
        eps, shared_by = config.rms_norm_eps, config.num_heads // config.num_kv_heads
        normed = layer.rms_norm(hidden, "input_layernorm", eps).to(self._dtype)

        def heads(name: str) -> Tensor:
            return layer.linear(normed, f"self_attn.{name}_proj").view(*normed.shape[:2], -1, config.head_dim)

        q = rotate(layer.rms_norm(heads("q"), "self_attn.q_norm", eps), cos, sin)
        k = rotate(layer.rms_norm(heads("k"), "self_attn.k_norm", eps), cos, sin)
        k, v = (tensor.repeat_interleave(shared_by, 2) for tensor in (k, heads("v")))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + layer.linear(attended.transpose(1, 2).flatten(2), "self_attn.o_proj")
        normed = layer.rms_norm(hidden, "post_attention_layernorm", eps).to(self._dtype)
        inner = F.silu(layer.linear(normed, "mlp.gate_proj")) * layer.linear(normed, "mlp.up_proj")
        return hidden + layer.linear(inner, "mlp.down_proj")


@dataclass(frozen=True, slots=True)
class _Part:
    """The weights whose names begin with `prefix`."""

    weights: Mapping[str, Tensor]
    prefix: str

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[self.prefix + name]

    def inside(self, prefix: str) -> _Part:
        return _Part(self.weights, self.prefix + prefix)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self[f"{name}.weight"], self.weights.get(f"{self.prefix}{name}.bias"))

    def layer_norm(self, x: Tensor, name: str) -> Tensor:
        weight = self[f"{name}.weight"]
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), self[f"{name}.bias"].to(x.dtype), LAYER_NORM_EPS)

    def rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        weight = self[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _gather(layout: Layout, shown: Tensor, levels: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """What the rows show of each size's levels, in the order of the rows: a level, float32 [B * tokens, hidden]."""
    sizes = sizes_of(layout)
    gathered = []
    for level in range(len(levels[0])):
        slots = [
            levels[sizes.index(slot)][level].index_select(0, shown[:, number])
            for number, slot in enumerate(layout.slots)
        ]
        gathered.append(torch.cat(slots, 1).flatten(0, 1))
    return tuple(gathered)


def patchify(pixels: Tensor, patch: int, merge: int) -> Tensor:
    """uint8 [P, frames, height, width, 3] -> float32 [P, patches, 3 * frames * patch * patch] between -1 and 1.

    Patches in merge-block order, each channel by channel, frame by frame, row by row.
    """
    count, frames, height, width, _ = pixels.shape
    values = pixels.float() / 127.5 - 1
    blocks = values.view(
        count, frames, height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3
    )
    return blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(count, (height // patch) * (width // patch), -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding over halves of the last axis; cos and sin broadcast against half of it."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
