"""How kernels of a step follow each other."""

from __future__ import annotations

from functools import lru_cache

import torch

from prism_server.ops.capability import is_hopper


@lru_cache
def overlapped(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that may start while the one before it ends (programmatic dependent launch).

    Where the GPU can (compute capability 9), a kernel with PDL lets its follower start at once, reads only what no
    kernel of the step writes, then waits for its predecessors before it touches an activation or writes anything.
    """
    if is_hopper(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}
