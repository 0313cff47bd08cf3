"""Shapes against the bundled checkpoint, the released models' figures and their config.json in both spellings."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from prism_server.capacity.models import KNOWN_MODELS, resolve_shape, shape_from_config
from prism_server.checkpoint_files import Fields
from prism_server.demo_model import checkpoint_dir
from prism_server.errors import StartupError


def tensor_bytes(shard: Path) -> int:
    """Bytes of the tensors in a safetensors file, from its header (an 8-byte length, then JSON)."""
    with shard.open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    return sum(
        end - begin
        for name, entry in header.items()
        if name != "__metadata__"
        for begin, end in [entry["data_offsets"]]
    )


def test_weight_bytes_equal_the_bundled_checkpoints_tensors_exactly() -> None:
    shards = list(checkpoint_dir().glob("*.safetensors"))
    assert len(shards) == 2
    assert KNOWN_MODELS["demo"].weight_bytes("bf16") == sum(tensor_bytes(shard) for shard in shards)


def test_the_known_demo_shape_is_the_one_in_its_config() -> None:
    read = resolve_shape(str(checkpoint_dir()))
    assert (read.text, read.vision) == (KNOWN_MODELS["demo"].text, KNOWN_MODELS["demo"].vision)


@pytest.mark.parametrize(
    ("name", "bf16_bytes", "fp8_bytes"),
    [("2b", 114_688, 59_136), ("4b", 147_456, 76_032), ("8b", 147_456, 76_032), ("32b", 262_144, 135_168)],
)
def test_kv_bytes_a_token(name: str, bf16_bytes: int, fp8_bytes: int) -> None:
    shape = KNOWN_MODELS[name]
    assert shape.page_layout("bf16").bytes_per_token == bf16_bytes
    assert shape.page_layout("fp8").bytes_per_token == fp8_bytes
    assert shape.page_layout("fp8", tensor_parallel=2).bytes_per_token * 2 == fp8_bytes


@pytest.mark.parametrize(("name", "billions"), [("2b", 2.13), ("4b", 4.44), ("8b", 8.77), ("32b", 33.36)])
def test_parameters_of_the_released_models(name: str, billions: float) -> None:
    assert round(KNOWN_MODELS[name].num_parameters() / 1e9, 2) == billions


def test_two_ranks_hold_the_vision_tower_twice_and_everything_else_once() -> None:
    shape = KNOWN_MODELS["8b"]
    twice = 2 * shape.weight_bytes("bf16", 2) - shape.weight_bytes("bf16", 1)
    norms = shape.text.replicated_parameters()
    assert twice == 2 * (shape.vision.parameters(shape.text.hidden_size) + norms)


def released_config() -> dict[str, object]:
    """The 8B as released: rope settings of the older spelling, head flag at the top."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            "num_hidden_layers": 36,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "rope_scaling": {"mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "in_channels": 3,
        },
    }


def test_a_released_config_gives_the_known_shape() -> None:
    assert shape_from_config("8b", Fields(released_config(), "config.json")) == KNOWN_MODELS["8b"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM'"),
        ({"text_config": {}}, "text_config: num_hidden_layers must be an integer of at least 1, not None"),
        ({"vision_config": None}, "vision_config must be an object"),
    ],
)
def test_a_config_of_something_else_is_refused_with_the_reason(change: dict[str, object], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        shape_from_config("x", Fields(released_config() | change, "config.json"))


def test_a_model_that_is_nowhere_and_a_config_that_is_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="neither one of 2b, 4b, 8b, 32b, demo nor a directory"):
        resolve_shape("9b")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartupError, match="is not JSON"):
        resolve_shape(str(tmp_path))


def test_a_split_that_does_not_divide_the_kv_heads_is_refused() -> None:
    for ranks in (0, 3, 16):
        with pytest.raises(StartupError, match="must divide its 8 KV heads"):
            KNOWN_MODELS["8b"].page_layout(tensor_parallel=ranks)
