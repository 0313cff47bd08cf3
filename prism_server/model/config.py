"""config.json of a Qwen3-VL checkpoint, in the released layout (4.57) and in that of transformers 5."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from prism_server.capacity.models import (
    ModelShape,
    TextShape,
    VisionShape,
    check_architecture,
    text_shape,
    vision_shape,
)
from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.checkpoint_files import Fields
from prism_server.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig(TextShape):
    """The language model: its shape, and the numbers that it computes with."""

    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]

    def __post_init__(self) -> None:
        TextShape.__post_init__(self)  # a class with slots is made twice: super() would look at the other one
        if self.head_dim % 2 or sum(self.mrope_section) != self.head_dim // 2:
            raise StartupError(
                f"mrope_section {list(self.mrope_section)} must add up to half of head_dim {self.head_dim}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig(VisionShape):
    """The vision tower: its shape, and what else it is computed with."""

    out_hidden_size: int
    rope_theta: float = 10000.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A whole model, and the ids of the tokens that stand for media."""

    text: TextConfig
    vision: VisionConfig
    image_token_id: int
    video_token_id: int

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
        config = Fields.of_file(directory / "config.json")
        check_architecture(config)
        return cls(
            text=_text(config),
            vision=_vision(config),
            image_token_id=config.integer("image_token_id"),
            video_token_id=config.integer("video_token_id"),
        )

    def shape(self, name: str) -> ModelShape:
        """What a plan on paper needs to know of this model, which it calls `name`."""
        return ModelShape(name, self.text, self.vision)

    def page_layout(self, page_tokens: int, kv_dtype: KVDtype) -> PageLayout:
        """What a page of this model's KV is made of."""
        return PageLayout(self.text.num_layers, self.text.num_kv_heads, self.text.head_dim, page_tokens, kv_dtype)


def _text(config: Fields) -> TextConfig:
    fields = config.group("text_config")
    fields.one_of("model_type", ("qwen3_vl_text",))
    fields.one_of("hidden_act", ("silu",))
    fields.one_of("attention_bias", (False,))
    if "num_experts" in fields.data:
        raise StartupError(f"{fields.place}: mixtures of experts are not supported (num_experts)")
    rope = _rope(fields)
    section = rope.integers("mrope_section")
    if len(section) != 3:
        raise StartupError(f"{rope.place}: mrope_section must have three numbers, not {list(section)}")
    return TextConfig(
        **asdict(text_shape(config)),
        max_position_embeddings=fields.size("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta"),
        mrope_section=(section[0], section[1], section[2]),
    )


def _rope(fields: Fields) -> Fields:
    """`rope_parameters` (transformers 5), or `rope_scaling` with `rope_theta` beside it (as released)."""
    if "rope_parameters" in fields.data:
        rope = fields.group("rope_parameters")
    else:
        scaling = fields.group("rope_scaling")
        rope = Fields({"rope_theta": fields.data.get("rope_theta"), **scaling.data}, scaling.place)
    rope.one_of("rope_type", ("default",))
    rope.one_of("type", ("default",))
    rope.one_of("mrope_interleaved", (True,))
    return rope


def _vision(config: Fields) -> VisionConfig:
    fields = config.group("vision_config")
    fields.one_of("model_type", ("qwen3_vl", "qwen3_vl_vision"))
    fields.one_of("hidden_act", ("gelu_pytorch_tanh",))
    rope_theta = 10000.0
    if "rope_parameters" in fields.data:
        rope = fields.group("rope_parameters")
        rope.one_of("rope_type", ("axial",))
        rope_theta = rope.number("rope_theta")
    return VisionConfig(
        **asdict(vision_shape(config)), out_hidden_size=fields.size("out_hidden_size"), rope_theta=rope_theta
    )
