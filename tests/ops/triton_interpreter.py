"""Imported before anything of Triton: without a GPU, kernels run in its interpreter, on the CPU."""

from __future__ import annotations

import os

import torch

INTERPRETED = not torch.cuda.is_available()
DEVICE = "cpu" if INTERPRETED else "cuda"
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"
