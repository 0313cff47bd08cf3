"""config.json of a Qwen3-VL checkpoint, in the released layout (4.57) and in that of transformers 5."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.errors import StartupError

ARCHITECTURE = "Qwen3VLForConditionalGeneration"


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The language model's shapes."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    tied_head: bool

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise StartupError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2 or sum(self.mrope_section) != self.head_dim // 2:
            raise StartupError(
                f"mrope_section {list(self.mrope_section)} must add up to half of head_dim {self.head_dim}"
            )


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """The vision tower's shapes. Level k of DeepStack leaves the tower after block `deepstack_blocks[k]`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_blocks: tuple[int, ...]
    rope_theta: float = 10000.0

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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole model, and the ids of the tokens that stand for media."""

    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    def __post_init__(self) -> None:
        if self.vision.out_hidden_size != self.text.hidden_size:
            raise StartupError(
                f"vision out_hidden_size {self.vision.out_hidden_size} is not hidden_size {self.text.hidden_size}"
            )
        if len(self.vision.deepstack_blocks) > self.text.num_layers:
            raise StartupError(
                f"{len(self.vision.deepstack_blocks)} DeepStack levels do not fit {self.text.num_layers} layers"
            )

    @classmethod
    def from_dir(cls, directory: Path) -> ModelConfig:
        """Read `directory`/config.json. StartupError, in one line, for what is not a dense Qwen3-VL."""
        path = directory / "config.json"
        fields = _Fields(read_json(path), str(path))
        architectures = fields.data.get("architectures")
        if architectures != [ARCHITECTURE]:
            raise StartupError(f"{path}: architectures is {architectures!r}; Prism serves {ARCHITECTURE}")
        text = _text(fields.group("text_config"), fields.data.get("tie_word_embeddings"))
        return cls(
            text=text,
            vision=_vision(fields.group("vision_config")),
            image_token_id=fields.integer("image_token_id"),
            video_token_id=fields.integer("video_token_id"),
            vision_start_token_id=fields.integer("vision_start_token_id"),
            vision_end_token_id=fields.integer("vision_end_token_id"),
        )

    def page_layout(self, page_tokens: int, kv_dtype: KVDtype) -> PageLayout:
        """What a page of this model's KV is made of."""
        return PageLayout(self.text.num_layers, self.text.num_kv_heads, self.text.head_dim, page_tokens, kv_dtype)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; StartupError when there is none."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise StartupError(f"{path} is not a JSON object")
    return data


@dataclass(frozen=True, slots=True)
class _Fields:
    """One JSON object of the configuration; whatever is missing or of another type is named with its place."""

    data: Mapping[str, Any]
    place: str

    def group(self, key: str) -> _Fields:
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise StartupError(f"{self.place}: {key} must be an object, not {value!r}")
        return _Fields(value, f"{self.place}: {key}")

    def integer(self, key: str, least: int = 0) -> int:
        value = self.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise StartupError(f"{self.place}: {key} must be an integer of at least {least}, not {value!r}")
        return value

    def size(self, key: str) -> int:
        return self.integer(key, least=1)

    def number(self, key: str) -> float:
        value = self.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise StartupError(f"{self.place}: {key} must be a positive number, not {value!r}")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise StartupError(f"{self.place}: {key} must be a list of integers, not {value!r}")
        return tuple(value)

    def one_of(self, key: str, known: tuple[Any, ...]) -> None:
        """The value, where there is one, must be one that Prism implements."""
        if key in self.data and self.data[key] not in known:
            raise StartupError(f"{self.place}: {key} {self.data[key]!r} is not supported; known: {known}")


def _text(fields: _Fields, tied_at_top: object) -> TextConfig:
    fields.one_of("model_type", ("qwen3_vl_text",))
    fields.one_of("hidden_act", ("silu",))
    fields.one_of("attention_bias", (False,))
    if "num_experts" in fields.data:
        raise StartupError(f"{fields.place}: mixtures of experts are not supported (num_experts)")
    rope = _rope(fields)
    section = rope.integers("mrope_section")
    if len(section) != 3:
        raise StartupError(f"{rope.place}: mrope_section must have three numbers, not {list(section)}")
    tied = tied_at_top if tied_at_top is not None else fields.data.get("tie_word_embeddings", False)
    return TextConfig(
        num_layers=fields.size("num_hidden_layers"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=fields.size("num_attention_heads"),
        num_kv_heads=fields.size("num_key_value_heads"),
        head_dim=fields.size("head_dim"),
        vocab_size=fields.size("vocab_size"),
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta"),
        mrope_section=(section[0], section[1], section[2]),
        tied_head=bool(tied),
    )


def _rope(fields: _Fields) -> _Fields:
    """`rope_parameters` (transformers 5), or `rope_scaling` with `rope_theta` beside it (as released)."""
    if "rope_parameters" in fields.data:
        rope = fields.group("rope_parameters")
    else:
        scaling = fields.group("rope_scaling")
        rope = _Fields({"rope_theta": fields.data.get("rope_theta"), **scaling.data}, scaling.place)
    rope.one_of("rope_type", ("default",))
    rope.one_of("type", ("default",))
    rope.one_of("mrope_interleaved", (True,))
    return rope


def _vision(fields: _Fields) -> VisionConfig:
    fields.one_of("model_type", ("qwen3_vl", "qwen3_vl_vision"))
    fields.one_of("hidden_act", ("gelu_pytorch_tanh",))
    rope_theta = 10000.0
    if "rope_parameters" in fields.data:
        rope = fields.group("rope_parameters")
        rope.one_of("rope_type", ("axial",))
        rope_theta = rope.number("rope_theta")
    return VisionConfig(
        depth=fields.size("depth"),
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=fields.size("num_heads"),
        in_channels=fields.size("in_channels"),
        patch_size=fields.size("patch_size"),
        temporal_patch_size=fields.size("temporal_patch_size"),
        merge_size=fields.size("spatial_merge_size"),
        out_hidden_size=fields.size("out_hidden_size"),
        num_position_embeddings=fields.size("num_position_embeddings"),
        deepstack_blocks=fields.integers("deepstack_visual_indexes"),
        rope_theta=rope_theta,
    )
