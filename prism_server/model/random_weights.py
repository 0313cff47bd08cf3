"""Weights of random values, made where they are used: a model for benchmarks, of a shape that no file is there for."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

import torch

from prism_server.model.loader import Progress, Shape, Tensors


def random_tensors(
    expected: Mapping[str, Shape],
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    progress: Progress | None = None,
) -> Tensors:
    """Exactly the `expected` tensors, on `device` in `dtype`, for benchmarks: the model answers nonsense.

    Matrices are normal with deviation 1 / sqrt(inputs), norms 1, biases 0, so that every layer adds about as much as
    the one before and nothing vanishes or overflows. A tensor depends on its name, `seed` and the kind of device only.
    `progress` is called with (made bytes, total bytes) after each tensor.
    """
    total_bytes = sum(math.prod(shape) for shape in expected.values()) * dtype.itemsize
    tensors: Tensors = {}
    made_bytes = 0
    for name, shape in expected.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith(".bias"):
            tensor.zero_()
        elif len(shape) == 1:
            tensor.fill_(1)
        else:
            generator = torch.Generator(device).manual_seed(_seed_of(name, seed))
            tensor.normal_(std=math.prod(shape[1:]) ** -0.5, generator=generator)
        tensors[name] = tensor
        made_bytes += tensor.nbytes
        if progress is not None:
            progress(made_bytes, total_bytes)
    return tensors


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest())
