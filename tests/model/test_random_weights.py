"""Random weights: the same for the same name and seed, every shape there, and a model whose numbers stay in bounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from reference import DEMO_CHECKPOINT, Prompt, Session, random_pixels

from prism_server.engine.build import build_parts
from prism_server.model import ModelConfig, Qwen3VL
from prism_server.model.loader import expected_shapes
from prism_server.model.random_weights import random_tensors
from prism_server.ops import make_ops
from prism_server.settings import KVSettings, ModelSettings, ServerSettings

SHAPES = expected_shapes(ModelConfig.from_dir(DEMO_CHECKPOINT))


def test_a_tensor_depends_on_its_name_and_the_seed_alone() -> None:
    name, shape = next((name, shape) for name, shape in SHAPES.items() if len(shape) > 1)
    whole = random_tensors(SHAPES, "cpu", torch.float32)
    alone = random_tensors({name: shape}, "cpu", torch.float32)
    other_seed = random_tensors({name: shape}, "cpu", torch.float32, seed=1)
    other_name = random_tensors({f"x.{name}": shape}, "cpu", torch.float32)
    assert torch.equal(whole[name], alone[name])
    assert not torch.equal(alone[name], other_seed[name])
    assert not torch.equal(alone[name], other_name[f"x.{name}"])


def test_every_tensor_is_there_and_a_product_keeps_the_size_of_what_goes_in() -> None:
    calls: list[tuple[int, int]] = []
    weights = random_tensors(SHAPES, "cpu", torch.bfloat16, progress=lambda *call: calls.append(call))
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == SHAPES
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert calls[-1] == (sum(weight.nbytes for weight in weights.values()),) * 2
    for name, weight in weights.items():
        if weight.dim() > 1:
            fan_in = weight[0].numel()
            assert weight.float().std().item() == pytest.approx(fan_in**-0.5, rel=0.1), name
        else:
            assert weight.unique().tolist() == [0.0 if name.endswith(".bias") else 1.0], name


@pytest.fixture
def weightless(tmp_path: Path) -> Path:
    """The demo checkpoint's other files, its config asking for a head of its own and many layers."""
    directory = tmp_path / "weightless"
    shutil.copytree(DEMO_CHECKPOINT, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((directory / "config.json").read_text())
    config["tie_word_embeddings"] = False
    config["text_config"]["num_hidden_layers"] = 36
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_an_engine_is_built_without_weight_files_and_has_a_namespace_of_its_own(weightless: Path) -> None:
    def namespace(path: Path, load_format: str) -> str:
        model = ModelSettings(path=str(path), load_format=load_format)  # type: ignore[arg-type]
        stages.clear()
        parts = build_parts(
            ServerSettings(model=model, kv=KVSettings(memory_bytes=8 << 20)), lambda p: stages.append(p.stage)
        )
        return parts.info.namespace

    stages: list[str] = []
    alone = namespace(weightless, "random")
    assert "making random weights" in stages
    assert "loading weights" not in stages
    assert len({alone, namespace(DEMO_CHECKPOINT, "random"), namespace(DEMO_CHECKPOINT, "safetensors")}) == 3


def test_activations_neither_vanish_nor_overflow_through_many_layers(weightless: Path) -> None:
    model = Qwen3VL.random(weightless, "cpu", torch.bfloat16, make_ops("torch", "cpu"))
    ids = list(range(40))
    prompt = Prompt(ids, [], [], torch.arange(40).expand(3, -1), [])
    logits = Session(model, [prompt], 16, "bf16").step({0: 40})
    assert 0.5 < logits.std().item() < 2
    assert len(set(logits.argmax(dim=1).tolist())) > 8  # rows are still told apart: measured 21 of 40
    picture = model.vision.begin(random_pixels((1, 8, 8), 1), (1, 8, 8))
    model.vision.advance(picture, model.config.vision.depth)
    features = model.vision.finish(picture)
    for level in (features.main, *features.deepstack):
        assert 0.05 < level.float().std().item() < 5
