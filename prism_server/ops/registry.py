"""Names of backends."""

from __future__ import annotations

from collections.abc import Callable

import torch

from prism_server.errors import StartupError
from prism_server.ops.interface import Ops
from prism_server.ops.torch_ops import TorchOps

BACKENDS: dict[str, Callable[[], Ops]] = {"torch": TorchOps}


def make_ops(name: str, device: torch.device | str) -> Ops:
    """The backend called `name` for `device`; `auto` is the best that the device has.

    StartupError when it is not known or the device is not there: what was asked for is never silently replaced.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"no operators for device {str(device)!r}; known: cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StartupError(f"device {str(device)!r} was asked for, but this process sees no CUDA device")
    backend = BACKENDS.get("torch" if name == "auto" else name)
    if backend is None:
        raise StartupError(f"operator backend {name!r} is not there; known: auto, {', '.join(BACKENDS)}")
    return backend()
