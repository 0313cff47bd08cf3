"""Full attention inside segments that lie side by side, read from the device: the vision tower's, in a graph.

Segments are cut into tiles of rows, none of which has rows of two: whatever is in one segment, infinity and NaN
included, changes nothing in another. The grid is fixed; programs without a tile end.
"""
# ruff: noqa: N803

import triton
import triton.language as tl
from triton.language.extra import cuda

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize_on_alignment=["tiles"])
def attend_segments(
    q,
    k,
    v,
    tiles,
    out,
    q_stride,
    k_stride,
    v_stride,
    scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A PROGRAMS-th of a tile's rows, and one head.

    q, k, v [rows, HEADS, HEAD_DIM] with rows so many elements apart; out the same, contiguous. tiles int32 [T, 3]:
    PROGRAMS * BLOCK_ROWS rows from the first number on, of the segment between the others; none where the first is the
    last. DIMS, a power of two, is at least HEAD_DIM. Grid (T * PROGRAMS, HEADS).
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    tile = tiles + tl.program_id(0) // PROGRAMS * 3
    first_row = tl.load(tile) + tl.program_id(0) % PROGRAMS * BLOCK_ROWS
    begin = tl.load(tile + 1)
    end = tl.load(tile + 2)
    if first_row >= end:
        return

    head = tl.program_id(1) * HEAD_DIM
    dims = tl.arange(0, DIMS)[None, :]
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    rows_there = (first_row + rows < end) & (dims < HEAD_DIM)
    keys = tl.arange(0, BLOCK_KEYS)
    queries = tl.load(q + first_row.to(tl.int64) * q_stride + head + rows * q_stride + dims, mask=rows_there, other=0.0)
    k += begin.to(tl.int64) * k_stride + head
    v += begin.to(tl.int64) * v_stride + head
    scale *= LOG2_E
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    sums = tl.zeros([BLOCK_ROWS, DIMS], tl.float32)
    length = end - begin
    for start in tl.range(0, length, BLOCK_KEYS):
        there = (start + keys[:, None] < length) & (dims < HEAD_DIM)
        key_tile = tl.load(k + (start + keys[:, None]) * k_stride + dims, mask=there, other=0.0)
        logits = tl.dot(queries, key_tile.T, input_precision="ieee")
        logits = tl.where(start + keys[None, :] < length, logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1) * scale)
        weights = tl.exp2(logits * scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        denominator = denominator * fade + tl.sum(weights, 1)
        value_tile = tl.load(v + (start + keys[:, None]) * v_stride + dims, mask=there, other=0.0)
        sums = tl.dot(weights.to(queries.dtype), value_tile, sums * fade[:, None], input_precision="ieee")
        top = new_top
    target = out + first_row.to(tl.int64) * (HEADS * HEAD_DIM) + head + rows * (HEADS * HEAD_DIM) + dims
    tl.store(target, (sums / denominator[:, None]).to(out.dtype.element_ty), mask=rows_there)
