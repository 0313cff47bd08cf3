"""What a device can do, by its compute capability."""

from __future__ import annotations

from functools import lru_cache

import torch

HOPPER = (9, 0)


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) of a CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def is_hopper(device: torch.device) -> bool:
    """Whether it is a GPU with bulk copies (TMA) and programmatic dependent launch."""
    return capability(device) >= HOPPER


def has_tma(device: torch.device) -> bool:
    """TMA is Hopper's, and the interpreter's."""
    return device.type != "cuda" or is_hopper(device)
