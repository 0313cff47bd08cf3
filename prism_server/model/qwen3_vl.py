"""A whole Qwen3-VL: the vision tower and the language model of one checkpoint, on one device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from prism_server.model.config import ModelConfig
from prism_server.model.loader import Progress, Tensors, expected_shapes, load_tensors
from prism_server.model.random_weights import random_tensors
from prism_server.model.text import TextModel
from prism_server.model.vision import VisionTower
from prism_server.ops.interface import Ops


class Qwen3VL:
    """`vision` turns pixels into features, `text` turns tokens and features into logits."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Tensors,
        ops: Ops,
        device: torch.device | str,
        dtype: torch.dtype,
        pixel_table: Tensor | None = None,
        fp8_head: bool = False,
    ) -> None:
        """`weights`, by released name, on `device` in `dtype`, leave the dict. `pixel_table`: see VisionTower;
        `fp8_head`: see TextModel."""
        self.config = config
        self.device = torch.device(device)
        self.dtype = dtype
        self.ops = ops
        self.vision = VisionTower(config.vision, weights, ops, self.device, pixel_table)
        self.text = TextModel(config.text, weights, ops, self.device, fp8_head)

    @classmethod
    def load(
        cls,
        directory: Path,
        device: torch.device | str,
        dtype: torch.dtype,
        ops: Ops,
        progress: Progress | None = None,
        pixel_table: Tensor | None = None,
        num_readers: int = 0,
        fp8_head: bool = False,
    ) -> Qwen3VL:
        """Read config.json and the safetensors files of `directory`; StartupError, in one line, if they do not fit."""
        config = ModelConfig.from_dir(directory)
        weights = load_tensors(directory, expected_shapes(config), device, dtype, progress, num_readers)
        return cls(config, weights, ops, device, dtype, pixel_table, fp8_head)

    @classmethod
    def random(
        cls,
        directory: Path,
        device: torch.device | str,
        dtype: torch.dtype,
        ops: Ops,
        progress: Progress | None = None,
        pixel_table: Tensor | None = None,
        fp8_head: bool = False,
    ) -> Qwen3VL:
        """The shape that `directory`'s config.json describes, with random weights; no safetensors file is needed."""
        config = ModelConfig.from_dir(directory)
        weights = random_tensors(expected_shapes(config), device, dtype, progress=progress)
        return cls(config, weights, ops, device, dtype, pixel_table, fp8_head)
