"""SwiGLU of any number of rows."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from prism_server.ops.triton.kernels.swiglu import swiglu_rows
from prism_server.ops.triton.launch import overlapped

BLOCK = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2n], contiguous, gate then up -> silu(gate) * up [T, n]; rounded once."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, BLOCK))
        swiglu_rows[grid](gate_up, out, width, BLOCK=BLOCK, num_warps=4, **overlapped(gate_up.device))
    return out
