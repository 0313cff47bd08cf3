"""Names of backends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from prism_server.errors import StartupError
from prism_server.ops.capability import capability
from prism_server.ops.interface import Ops
from prism_server.ops.torch_ops import TorchOps

LEAST_CAPABILITY = (8, 0)
"""Of the GPUs that the Triton kernels are made for."""


def make_ops(name: str, device: torch.device | str) -> Ops:
    """The backend called `name` for `device`; `auto` is the best that the device has.

    StartupError when it is not known, the device is not there, or the backend cannot work on it: what was asked for is
    never silently replaced.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"no operators for device {str(device)!r}; known: cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"device {str(device)!r} was asked for, but this process sees no CUDA device")
    if name == "auto":
        name = "triton" if capability(device) >= LEAST_CAPABILITY else "torch"
    backend = BACKENDS.get(name)
    if backend is None:
        raise StartupError(f"operator backend {name!r} is not there; known: auto, {', '.join(BACKENDS)}")
    return backend(device)


def _make_torch(device: torch.device) -> Ops:
    return TorchOps()


def _make_triton(device: torch.device) -> Ops:
    _require_gpu("triton", device)
    try:
        from prism_server.ops.triton.ops import TritonOps
    except ImportError as error:
        raise StartupError(f"operator backend 'triton' cannot be loaded: {error}") from error
    return TritonOps()


def _make_flashinfer(device: torch.device) -> Ops:
    _require_gpu("flashinfer", device)
    try:
        from prism_server.ops.flashinfer_ops import FlashInferOps
    except ImportError as error:
        raise StartupError(
            f"operator backend 'flashinfer' cannot be loaded: {error}; it comes with `pip install prism-server[cuda]`"
        ) from error
    return FlashInferOps()


def _require_gpu(name: str, device: torch.device) -> None:
    if capability(device) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        raise StartupError(
            f"operator backend {name!r} needs an NVIDIA GPU of compute capability {least} or more, and device "
            f"{str(device)!r} is none; `auto` takes what there is"
        )


BACKENDS: dict[str, Callable[[torch.device], Ops]] = {
    "torch": _make_torch,
    "triton": _make_triton,
    "flashinfer": _make_flashinfer,
}
