"""SwiGLU of many rows, after a product that did not have it in its epilogue."""
# ruff: noqa: N803

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def swiglu_rows(gate_up, out, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """gate_up [rows, 2 * width], gate then up -> out [rows, width]. Grid (rows, ceil(width / BLOCK))."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + 2 * row + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * row + width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)
