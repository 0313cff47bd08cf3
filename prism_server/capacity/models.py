"""Shapes of the known Qwen3-VL models, and what follows by arithmetic: parameters, weight bytes, KV pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.errors import StartupError

WeightDtype = Literal["bf16", "fp32"]

WEIGHT_ELEMENT_BYTES: dict[WeightDtype, int] = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class TextShape:
    """The language model: grouped-query attention with QK-norm, gated MLP, no biases."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")

    def split_parameters(self) -> int:
        """Parameters that tensor parallelism divides: the projections of every layer, the embedding and the head."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        tables = (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * (attention + mlp) + tables

    def replicated_parameters(self) -> int:
        """Parameters that every rank holds: the norms."""
        return self.num_layers * (2 * self.hidden_size + 2 * self.head_dim) + self.hidden_size


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The vision tower with its main merger and one merger per DeepStack level."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_positions: int
    deepstack_layers: tuple[int, ...]
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    in_channels: int = 3

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"vision width {self.hidden_size} is not divisible by {self.num_heads} heads")
        if any(not 0 <= layer < self.num_layers for layer in self.deepstack_layers):
            raise ValueError(f"DeepStack layers {self.deepstack_layers} lie outside a tower of {self.num_layers}")

    @property
    def patch_values(self) -> int:
        """Numbers in one patch: channels x frames x patch x patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    def parameters(self, out_hidden_size: int) -> int:
        """Parameters of the tower; a merger maps merge^2 patches to one row of `out_hidden_size`."""
        h, inner = self.hidden_size, self.intermediate_size
        embedding = (self.patch_values + 1) * h + self.num_positions * h
        block = 2 * 2 * h + (h + 1) * 3 * h + (h + 1) * h + (h + 1) * inner + (inner + 1) * h
        merged = self.patches_per_token * h
        merger = (merged + 1) * merged + (merged + 1) * out_hidden_size
        main_norm, level_norm = 2 * h, 2 * merged  # the main merger normalises before it merges, the levels after
        levels = len(self.deepstack_layers)
        return embedding + self.num_layers * block + (1 + levels) * merger + main_norm + levels * level_norm


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One Qwen3-VL model, as far as memory is concerned."""

    name: str
    text: TextShape
    vision: VisionShape

    def num_parameters(self) -> int:
        text = self.text.split_parameters() + self.text.replicated_parameters()
        return text + self.vision.parameters(self.text.hidden_size)

    def check_tensor_parallel(self, ranks: int) -> None:
        """StartupError unless `ranks` GPUs can share the heads evenly."""
        if ranks < 1 or self.text.num_kv_heads % ranks:
            raise StartupError(
                f"{self.name} cannot be split over {ranks} GPUs: "
                f"tensor parallelism must divide its {self.text.num_kv_heads} KV heads"
            )

    def weight_bytes(self, dtype: WeightDtype = "bf16", tensor_parallel: int = 1) -> int:
        """Bytes of the weights on one rank. Ranks encode whole pictures, so each holds the whole vision tower."""
        self.check_tensor_parallel(tensor_parallel)
        replicated = self.text.replicated_parameters() + self.vision.parameters(self.text.hidden_size)
        split = -(-self.text.split_parameters() // tensor_parallel)
        return (split + replicated) * WEIGHT_ELEMENT_BYTES[dtype]

    def fp8_head_bytes(self, tensor_parallel: int = 1) -> int:
        """Bytes of one rank's part of the LM head's copy (`model.fp8_head`): E4M3 numbers, an FP32 scale a token."""
        self.check_tensor_parallel(tensor_parallel)
        rows = -(-self.text.vocab_size // tensor_parallel)
        return rows * (self.text.hidden_size + 4)

    def page_layout(self, kv_dtype: KVDtype = "fp8", page_tokens: int = 64, tensor_parallel: int = 1) -> PageLayout:
        """The KV pages of one rank, which holds its share of the KV heads."""
        self.check_tensor_parallel(tensor_parallel)
        return PageLayout(
            num_layers=self.text.num_layers,
            num_kv_heads=self.text.num_kv_heads // tensor_parallel,
            head_dim=self.text.head_dim,
            page_tokens=page_tokens,
            kv_dtype=kv_dtype,
        )


def _dense(layers: int, hidden: int, intermediate: int, heads: int, tied: bool) -> TextShape:
    return TextShape(layers, hidden, intermediate, heads, 8, 128, 151_936, tied)


_SMALL_TOWER = VisionShape(24, 1024, 4096, 16, 48 * 48, (5, 11, 17))
_LARGE_TOWER = VisionShape(27, 1152, 4304, 16, 48 * 48, (8, 16, 24))

KNOWN_MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape("2b", _dense(28, 2048, 6144, 16, tied=True), _SMALL_TOWER),
        ModelShape("4b", _dense(36, 2560, 9728, 32, tied=True), _SMALL_TOWER),
        ModelShape("8b", _dense(36, 4096, 12288, 32, tied=False), _LARGE_TOWER),
        ModelShape("32b", _dense(64, 5120, 25600, 64, tied=False), _LARGE_TOWER),
        ModelShape(
            "demo",
            TextShape(6, 256, 640, 4, 2, 128, 1024, True),
            VisionShape(6, 192, 512, 3, 24 * 24, (1, 3, 4)),
        ),
    )
}
"""The released dense models, from their config.json, and the bundled one."""


def shape_from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """The shape that a Qwen3-VL `config.json` describes. StartupError when it is another model's or lacks a key."""
    if config.get("model_type") != "qwen3_vl":
        raise StartupError(f"{name}: model_type is {config.get('model_type')!r}; Prism serves 'qwen3_vl'")
    try:
        text, vision = config["text_config"], config["vision_config"]
        return ModelShape(
            name=name,
            text=TextShape(
                num_layers=text["num_hidden_layers"],
                hidden_size=text["hidden_size"],
                intermediate_size=text["intermediate_size"],
                num_heads=text["num_attention_heads"],
                num_kv_heads=text["num_key_value_heads"],
                head_dim=text.get("head_dim", 128),
                vocab_size=text["vocab_size"],
                tied_head=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
            ),
            vision=VisionShape(
                num_layers=vision["depth"],
                hidden_size=vision["hidden_size"],
                intermediate_size=vision["intermediate_size"],
                num_heads=vision["num_heads"],
                num_positions=vision["num_position_embeddings"],
                deepstack_layers=tuple(vision["deepstack_visual_indexes"]),
                patch_size=vision.get("patch_size", 16),
                temporal_patch_size=vision.get("temporal_patch_size", 2),
                merge_size=vision.get("spatial_merge_size", 2),
                in_channels=vision.get("in_channels", 3),
            ),
        )
    except KeyError as missing:
        raise StartupError(f"{name}: config.json has no {missing.args[0]!r}") from None
    except (TypeError, ValueError, AttributeError) as broken:
        raise StartupError(f"{name}: config.json describes no Qwen3-VL model: {broken}") from None


def resolve_shape(model: str) -> ModelShape:
    """The shape of a known name (`8b`, `demo`, ...) or of a directory's `config.json`. StartupError otherwise."""
    known = KNOWN_MODELS.get(model.lower())
    if known is not None:
        return known
    path = Path(model) / "config.json"
    if not path.is_file():
        raise StartupError(
            f"model {model!r} is neither one of {', '.join(KNOWN_MODELS)} nor a directory with a config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise StartupError(f"{path} is not valid JSON: {broken}") from None
    if not isinstance(config, dict):
        raise StartupError(f"{path} must hold a JSON object")
    return shape_from_config(Path(model).resolve().name, config)
