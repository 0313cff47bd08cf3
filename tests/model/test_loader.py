"""Safetensors to tensors: shards, ties, casts, progress, and files that do not fit the configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference import DEMO_CHECKPOINT, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from prism_server.errors import StartupError
from prism_server.model import ModelConfig, Qwen3VL, ranges
from prism_server.model.loader import expected_shapes, load_tensors
from prism_server.ops import make_ops

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tied model in one file."""
    directory = tmp_path_factory.mktemp("single")
    tiny_model("2b").save_pretrained(directory)
    return directory


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_tensors(directory, expected_shapes(ModelConfig.from_dir(directory)), "cpu", dtype)


@pytest.mark.parametrize("kind", ["2b", "8b"])
@pytest.mark.parametrize("shard", ["200KB", "5GB"])
def test_every_weight_is_loaded_by_its_released_name(tmp_path: Path, kind: str, shard: str) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "200KB")
    stored = dict(model.state_dict())
    if kind == "2b":
        del stored["lm_head.weight"]
    loaded = load(tmp_path)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)


def test_weights_are_cast_and_progress_reaches_the_total_of_stored_bytes() -> None:
    calls: list[tuple[int, int]] = []
    shapes = expected_shapes(ModelConfig.from_dir(DEMO_CHECKPOINT))
    loaded = load_tensors(DEMO_CHECKPOINT, shapes, "cpu", torch.float32, lambda *call: calls.append(call))
    assert {tensor.dtype for tensor in loaded.values()} == {torch.float32}
    total_bytes = 2 * sum(tensor.numel() for tensor in loaded.values())  # the files hold BF16
    assert calls[-1] == (total_bytes, total_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert len(calls) == len(loaded)


def test_the_models_take_every_tensor_out(single: Path) -> None:
    weights = load(single)
    Qwen3VL(ModelConfig.from_dir(single), weights, make_ops("torch", "cpu"), "cpu", torch.float32)
    assert not weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_many_readers_of_small_pieces_read_every_bit(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(ranges, "PIECE_BYTES", 1000)  # no divisor of the rows
    calls: list[tuple[int, int]] = []

    def cast(weights: Weights) -> None:
        weights.update({name: weight.to(stored) for name, weight in weights.items()})

    directory = spoiled(single, tmp_path, cast)
    expected = load_file(directory / "model.safetensors")
    shapes = expected_shapes(ModelConfig.from_dir(directory))
    loaded = load_tensors(directory, shapes, "cpu", dtype, lambda *call: calls.append(call), num_readers=5)
    assert all(torch.equal(loaded[name], expected[name].to(dtype)) for name in expected)
    total_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert [total for _, total in calls] == [total_bytes] * len(calls)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1][0] == total_bytes
    assert len(calls) > total_bytes // 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_gets_the_same_bits_through_pinned_buffers(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    shapes = expected_shapes(ModelConfig.from_dir(DEMO_CHECKPOINT))
    on_cpu = load_tensors(DEMO_CHECKPOINT, shapes, "cpu", dtype)
    monkeypatch.setattr(ranges, "PIECE_BYTES", 100_000)  # buffers are used again many times
    on_gpu = load_tensors(DEMO_CHECKPOINT, shapes, "cuda", dtype, num_readers=4)
    assert all(torch.equal(on_gpu[name].cpu(), tensor) for name, tensor in on_cpu.items())


def test_a_file_that_cannot_be_read_any_more_is_named_and_every_reader_ends(single: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    targets = {str(i): torch.empty(4) for i in range(50)}
    stored = [ranges.StoredTensor(name, file, 16 * int(name), torch.float32, (4,)) for name in targets]
    with pytest.raises(StartupError, match=r"cannot read .*model\.safetensors: No such file"):
        ranges.read_tensors(stored, targets, 4, lambda _: None)
    file.write_bytes(bytes(16 * 49))
    with pytest.raises(StartupError, match=r"model\.safetensors ended while it was read"):
        ranges.read_tensors(stored, targets, 4, lambda _: None)


def spoiled(single: Path, directory: Path, spoil: Callable[[Weights], None]) -> Path:
    weights = load_file(single / "model.safetensors")
    spoil(weights)
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_bytes((single / "config.json").read_bytes())
    return directory


NORM = "model.language_model.norm.weight"
BLOCK = "model.visual.blocks.1.attn.qkv.weight"


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda w: w.pop(BLOCK), BLOCK),
        (lambda w: w.update({"model.language_model.layers.4.mlp.up_proj.weight": torch.ones(2)}), "layers.4.mlp"),
        (lambda w: w.update({NORM: torch.ones(63)}), rf"{NORM} has shape \[63\].*\[64\]"),
        (lambda w: w.update({NORM: torch.ones(64, dtype=torch.int8)}), f"{NORM} has type I8"),
        (lambda w: w.update({BLOCK: w[BLOCK].to(torch.float8_e4m3fn)}), f"{BLOCK} has type F8_E4M3"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    single: Path, tmp_path: Path, spoil: Callable[[Weights], None], named: str
) -> None:
    with pytest.raises(StartupError, match=named) as refused:
        load(spoiled(single, tmp_path, spoil))
    assert "\n" not in refused.value.reason


def test_a_tied_head_that_is_stored_all_the_same_is_passed_over(single: Path, tmp_path: Path) -> None:
    directory = spoiled(single, tmp_path, lambda w: w.update({"lm_head.weight": torch.ones(96, 64)}))
    assert load(directory).keys() == load(single).keys()


def test_missing_and_broken_files_are_named(single: Path, tmp_path: Path) -> None:
    shapes = expected_shapes(ModelConfig.from_dir(single))
    with pytest.raises(StartupError, match=r"has no model\.safetensors"):
        load_tensors(tmp_path, shapes, "cpu", torch.float32)
    (tmp_path / "model.safetensors").write_bytes((single / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(StartupError, match=r"model\.safetensors is not a whole") as refused:
        load_tensors(tmp_path, shapes, "cpu", torch.float32)
    assert "\n" not in refused.value.reason
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-7.safetensors"}}')
    with pytest.raises(StartupError, match=r"has no model-7\.safetensors"):
        load_tensors(tmp_path, shapes, "cpu", torch.float32)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(StartupError, match="weight_map"):
        load_tensors(tmp_path, shapes, "cpu", torch.float32)
