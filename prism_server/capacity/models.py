"""Shapes of the known Qwen3-VL models, and what follows by arithmetic: parameters, weight bytes, KV pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.checkpoint_files import Fields
from prism_server.errors import StartupError

ARCHITECTURE = "Qwen3VLForConditionalGeneration"

WeightDtype = Literal["bf16", "fp32"]

WEIGHT_ELEMENT_BYTES: dict[WeightDtype, int] = {"bf16": 2, "fp32": 4}

Switch = Literal["auto", "on", "off"]

FP8_HEAD_DEPTH_MULTIPLE = 32
"""Of the hidden size, for the LM head's FP8 copy to be cut into pairs of tiles."""


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
            raise StartupError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")

    def split_parameters(self) -> int:
        """Parameters that tensor parallelism divides: the projections of every layer, the embedding and the head."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        tables = (1 if self.tied_head else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * (attention + mlp) + tables

    def replicated_parameters(self) -> int:
        """Parameters that every rank holds: the norms."""
        return self.num_layers * (2 * self.hidden_size + 2 * self.head_dim) + self.hidden_size

    def has_fp8_head(self, switch: Switch, backend: str, dtype: WeightDtype) -> bool:
        """Whether the LM head gets an FP8 copy, by `model.fp8_head`, the operators and the weights' type. auto: where
        it can be cut and saves time, by the Triton kernels, which are for bf16."""
        if switch != "auto":
            return switch == "on"
        return backend == "triton" and dtype == "bf16" and self.hidden_size % FP8_HEAD_DEPTH_MULTIPLE == 0


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The vision tower with its main merger and one merger per DeepStack level: level k leaves the tower after block
    `deepstack_blocks[k]`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_position_embeddings: int
    deepstack_blocks: tuple[int, ...]
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    in_channels: int = 3

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise StartupError(
                f"vision hidden_size {self.hidden_size} must give each of {self.num_heads} heads a multiple of 4"
            )
        if round(self.num_position_embeddings**0.5) ** 2 != self.num_position_embeddings:
            raise StartupError(f"num_position_embeddings {self.num_position_embeddings} is not a square")
        if list(self.deepstack_blocks) != sorted(set(self.deepstack_blocks) & set(range(self.depth))):
            raise StartupError(
                f"deepstack_visual_indexes {list(self.deepstack_blocks)} must rise within {self.depth} vision blocks"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

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
        embedding = (self.patch_values + 1) * h + self.num_position_embeddings * h
        block = 2 * 2 * h + (h + 1) * 3 * h + (h + 1) * h + (h + 1) * inner + (inner + 1) * h
        merged = self.patches_per_token * h
        merger = (merged + 1) * merged + (merged + 1) * out_hidden_size
        main_norm, level_norm = 2 * h, 2 * merged  # the main merger normalises before it merges, the levels after
        levels = len(self.deepstack_blocks)
        return embedding + self.depth * block + (1 + levels) * merger + main_norm + levels * level_norm


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


def check_architecture(config: Fields) -> None:
    """StartupError unless a `config.json` is that of a dense Qwen3-VL."""
    architectures = config.data.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise StartupError(f"{config.place}: architectures is {architectures!r}; Prism serves {ARCHITECTURE}")


def text_shape(config: Fields) -> TextShape:
    """Of a whole `config.json`. Whether the head is tied stands at its top, or among the text's own (older files)."""
    text = config.group("text_config")
    tied_at_top = config.data.get("tie_word_embeddings")
    tied = tied_at_top if tied_at_top is not None else text.data.get("tie_word_embeddings", False)
    return TextShape(
        num_layers=text.size("num_hidden_layers"),
        hidden_size=text.size("hidden_size"),
        intermediate_size=text.size("intermediate_size"),
        num_heads=text.size("num_attention_heads"),
        num_kv_heads=text.size("num_key_value_heads"),
        head_dim=text.size("head_dim"),
        vocab_size=text.size("vocab_size"),
        tied_head=bool(tied),
    )


def vision_shape(config: Fields) -> VisionShape:
    """Of a whole `config.json`."""
    vision = config.group("vision_config")
    return VisionShape(
        depth=vision.size("depth"),
        hidden_size=vision.size("hidden_size"),
        intermediate_size=vision.size("intermediate_size"),
        num_heads=vision.size("num_heads"),
        num_position_embeddings=vision.size("num_position_embeddings"),
        deepstack_blocks=vision.integers("deepstack_visual_indexes"),
        patch_size=vision.size("patch_size"),
        temporal_patch_size=vision.size("temporal_patch_size"),
        merge_size=vision.size("spatial_merge_size"),
        in_channels=vision.size("in_channels"),
    )


def shape_from_config(name: str, config: Fields) -> ModelShape:
    """The shape that a Qwen3-VL `config.json` describes. StartupError when it is another model's or lacks a key."""
    check_architecture(config)
    return ModelShape(name, text_shape(config), vision_shape(config))


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
    return shape_from_config(Path(model).resolve().name, Fields.of_file(path))
