"""Inputs for products on a GPU."""

from __future__ import annotations

import random

import torch
from torch import Tensor

STEP_ROUNDING = 2.0**-22
"""Of one step of float32 sums on tensor cores (16 inputs; they cut off), relative to the sum of magnitudes."""


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.bfloat16, device="cuda").mul_(scale)


def rows_with_outliers(num_rows: int, depth: int, seed: int, times: int) -> Tensor:
    """Rows of very different size, a few channels so many `times` the rest; a row of zeros among many."""
    x = normal(num_rows, depth, seed=seed)
    x *= torch.logspace(-3, 2, num_rows, device="cuda", dtype=torch.bfloat16).unsqueeze(1)
    x[:, random.Random(seed).sample(range(depth), 3)] *= times
    if num_rows > 4:
        x[num_rows // 2] = 0
    return x
