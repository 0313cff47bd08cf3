"""Copies between host and device that never make the host wait for the device's work."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def staged(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy of `array` in host memory from which `device` can copy by itself. The array may be read-only."""
    target = torch.empty(array.shape, dtype=torch.from_numpy(array[:0].copy()).dtype, pin_memory=device.type == "cuda")
    target.numpy()[...] = array
    return target


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """`array` on `device`; in order with the work of the current stream."""
    return staged(array, device).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """`tensor` on the host; on CUDA its content is there once the current stream has come so far."""
    if tensor.device.type != "cuda":
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)
