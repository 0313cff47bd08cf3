"""Interleaved multimodal rotary positions: which of time, height and width turns which frequency."""

from __future__ import annotations

import torch
from torch import Tensor

from prism_server.model.config import TextConfig


class MRope:
    """Angles of the language model's rows.

    Of the head_dim / 2 frequencies theta^(-2i / head_dim), height takes i = 1, 4, 7, ... below 3 * section[1], width
    i = 2, 5, 8, ... below 3 * section[2], time all others, so that each axis gets high and low ones (Hugging Face
    transformers, `Qwen3VLTextRotaryEmbedding`).
    """

    def __init__(self, config: TextConfig, device: torch.device | str) -> None:
        half = config.head_dim // 2
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        self._inverse_frequency = 1.0 / (config.rope_theta**exponents)
        axis = torch.zeros(half, dtype=torch.int64)
        for number in (1, 2):
            axis[number : 3 * config.mrope_section[number] : 3] = number
        self._axis = axis.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [3, T] (time, height, width) -> cos, sin float32 [T, head_dim / 2]."""
        angles = positions.float().t()[:, self._axis] * self._inverse_frequency  # contiguous, as kernels want it
        return angles.cos(), angles.sin()
