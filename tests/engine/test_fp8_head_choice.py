"""Which engines keep an FP8 copy of the head: what `model.fp8_head` means for a backend, a type and a shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import settings_with
from test_gpu_memory_figures import FIGURES

from prism_server.capacity.models import Switch
from prism_server.demo_model import checkpoint_dir
from prism_server.engine.build import _model
from prism_server.engine.device_build import DeviceBuilder
from prism_server.errors import StartupError
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.ops.torch_ops import TorchOps

CPU = torch.device("cpu")


class NamedOps(TorchOps):
    """A CPU's operators, by another backend's name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


def model_of(
    path: Path | str = "demo", switch: Switch = "auto", backend: str = "triton", dtype: torch.dtype = torch.bfloat16
) -> Qwen3VL:
    settings = settings_with(model__path=str(path), model__load_format="random", model__fp8_head=switch)
    return _model(settings, CPU, dtype, NamedOps(backend), lambda progress: None, torch.zeros(256, 3))


def checkpoint_of_hidden_size(folder: Path, hidden_size: int) -> Path:
    """The demo model's config, of another hidden size."""
    config: dict[str, Any] = json.loads((checkpoint_dir() / "config.json").read_text())
    config["text_config"]["hidden_size"] = config["vision_config"]["out_hidden_size"] = hidden_size
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("switch", "backend", "dtype", "copied"),
    [
        ("auto", "triton", torch.bfloat16, True),
        ("auto", "triton", torch.float32, False),
        ("auto", "flashinfer", torch.bfloat16, False),
        ("auto", "torch", torch.bfloat16, False),
        ("off", "triton", torch.bfloat16, False),
        ("on", "torch", torch.float32, True),
    ],
)
def test_auto_is_on_with_the_triton_backend_in_bf16_alone(
    switch: Switch, backend: str, dtype: torch.dtype, copied: bool
) -> None:
    assert model_of(switch=switch, backend=backend, dtype=dtype).text.has_fp8_head == copied


def test_a_head_that_cannot_be_cut_has_no_copy_and_asking_for_one_is_an_error(tmp_path: Path) -> None:
    odd = checkpoint_of_hidden_size(tmp_path, 272)
    assert not model_of(odd).text.has_fp8_head
    with pytest.raises(StartupError, match=r"model\.fp8_head: the hidden size 272 is no multiple of 32"):
        model_of(odd, "on")


@pytest.mark.parametrize(
    ("switch", "missing_bytes", "said"), [("auto", 0, True), ("auto", 1, False), ("off", 0, False)]
)
def test_a_card_that_is_too_small_for_the_copy_alone_is_told_so(switch: Switch, missing_bytes: int, said: bool) -> None:
    settings, model = settings_with(kv__dtype="fp8"), model_of(switch=switch)
    layout = model.config.page_layout(settings.kv.page_tokens, settings.kv.dtype)
    builder = DeviceBuilder(settings, model, layout, (), lambda progress: None)
    needed_bytes = layout.pages_for(model.config.text.max_position_embeddings) * layout.page_bytes
    copy_bytes = model.config.shape("demo").fp8_head_bytes()
    short_bytes = FIGURES.pool_bytes - needed_bytes + copy_bytes + missing_bytes
    figures = replace(FIGURES, graph_bytes=FIGURES.graph_bytes + short_bytes)
    with pytest.raises(StartupError, match="does not fit") as refused:
        builder._num_pages(figures)
    assert ("(model.fp8_head off) it fits" in refused.value.reason) == said
    enough = replace(figures, graph_bytes=figures.graph_bytes - copy_bytes - missing_bytes)
    assert builder._num_pages(enough) == layout.pages_in(needed_bytes)
