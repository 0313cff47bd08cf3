"""Reading config.json: both layouts, and what is not a dense Qwen3-VL."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reference import DEMO_CHECKPOINT, tiny_config

from prism_server.capacity.models import KNOWN_MODELS, ModelShape
from prism_server.capacity.page_layout import PageLayout
from prism_server.errors import StartupError
from prism_server.model import ModelConfig

Json = dict[str, Any]


def released_config() -> Json:
    """The 4B model's configuration in the layout in which it was released."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": True,
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024,
            "in_channels": 3,
            "intermediate_size": 4096,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


def written(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


def test_the_released_layout_is_read(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(written(tmp_path, released_config()))
    assert (config.text.rope_theta, config.text.mrope_section, config.text.tied_head) == (5e6, (24, 20, 20), True)
    assert (config.vision.head_dim, config.vision.deepstack_blocks) == (64, (5, 11, 17))
    assert config.page_layout(64, "fp8") == PageLayout(36, 8, 128, 64, "fp8")
    assert config.page_layout(64, "fp8").bytes_per_token == 76_032


def test_the_layout_of_transformers_5_gives_the_same(tmp_path: Path) -> None:
    old = ModelConfig.from_dir(written(tmp_path, released_config()))
    new = released_config()
    rope = new["text_config"].pop("rope_scaling")
    new["text_config"]["rope_parameters"] = {"rope_theta": new["text_config"].pop("rope_theta"), **rope}
    new["text_config"]["rope_scaling"] = None
    new["vision_config"]["model_type"] = "qwen3_vl_vision"
    new["vision_config"]["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "axial"}
    assert ModelConfig.from_dir(written(tmp_path, new)) == old


def test_what_transformers_saves_and_the_demo_checkpoint_are_read(tmp_path: Path) -> None:
    saved = tiny_config("8b")
    saved.architectures = ["Qwen3VLForConditionalGeneration"]
    saved.save_pretrained(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    assert (config.vision.head_dim, config.text.tied_head, config.image_token_id) == (72, False, 90)
    demo = ModelConfig.from_dir(DEMO_CHECKPOINT)
    assert (demo.text.num_layers, demo.text.head_dim, demo.vision.num_position_embeddings) == (6, 128, 576)


def test_a_plan_counts_a_loaded_config_as_it_counts_the_known_model(tmp_path: Path) -> None:
    def counted(shape: ModelShape) -> tuple[object, ...]:
        return shape.name, shape.weight_bytes(), shape.fp8_head_bytes(), shape.page_layout(), shape.vision.patch_values

    read = ModelConfig.from_dir(written(tmp_path, released_config()))
    assert counted(read.shape("4b")) == counted(KNOWN_MODELS["4b"])


def no_architecture(config: Json) -> None:
    del config["architectures"]


def other_architecture(config: Json) -> None:
    config["architectures"] = ["LlamaForCausalLM"]


def mixture(config: Json) -> None:
    config["text_config"]["num_experts"] = 128


def other_text_type(config: Json) -> None:
    config["text_config"]["model_type"] = "qwen3_vl_moe_text"


def scaled_rope(config: Json) -> None:
    config["text_config"]["rope_scaling"]["rope_type"] = "yarn"


def plain_sections(config: Json) -> None:
    config["text_config"]["rope_scaling"]["mrope_interleaved"] = False


def no_rope(config: Json) -> None:
    del config["text_config"]["rope_scaling"]


def no_theta(config: Json) -> None:
    del config["text_config"]["rope_theta"]


def short_section(config: Json) -> None:
    config["text_config"]["rope_scaling"]["mrope_section"] = [24, 20]


def uneven_section(config: Json) -> None:
    config["text_config"]["rope_scaling"]["mrope_section"] = [24, 20, 21]


def no_hidden_size(config: Json) -> None:
    del config["text_config"]["hidden_size"]


def text_size(config: Json) -> None:
    config["vision_config"]["depth"] = "24"


def zero_size(config: Json) -> None:
    config["text_config"]["num_hidden_layers"] = 0


def no_vision(config: Json) -> None:
    del config["vision_config"]


def late_level(config: Json) -> None:
    config["vision_config"]["deepstack_visual_indexes"] = [5, 11, 24]


def other_width(config: Json) -> None:
    config["vision_config"]["out_hidden_size"] = 4096


def uneven_heads(config: Json) -> None:
    config["text_config"]["num_key_value_heads"] = 5


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (no_architecture, "architectures"),
        (other_architecture, "LlamaForCausalLM"),
        (mixture, "num_experts"),
        (other_text_type, "qwen3_vl_moe_text"),
        (scaled_rope, "yarn"),
        (plain_sections, "mrope_interleaved"),
        (no_rope, "rope_scaling"),
        (no_theta, "rope_theta"),
        (short_section, "mrope_section"),
        (uneven_section, "mrope_section"),
        (no_hidden_size, "hidden_size"),
        (text_size, "depth"),
        (zero_size, "num_hidden_layers"),
        (no_vision, "vision_config"),
        (late_level, "deepstack_visual_indexes"),
        (other_width, "out_hidden_size"),
        (uneven_heads, "32 heads"),
    ],
)
def test_what_is_not_a_dense_qwen3_vl_is_refused_in_one_line(
    tmp_path: Path, spoil: Callable[[Json], None], named: str
) -> None:
    config = released_config()
    spoil(config)
    with pytest.raises(StartupError, match=named) as refused:
        ModelConfig.from_dir(written(tmp_path, config))
    assert "\n" not in refused.value.reason


@pytest.mark.parametrize(
    ("content", "named"), [("{", "not JSON"), ("[]", "must hold a JSON object"), ("\xff", "cannot be read")]
)
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(StartupError, match=named) as refused:
        ModelConfig.from_dir(tmp_path)
    assert "\n" not in refused.value.reason


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path / "nowhere")
