"""Full attention inside segments that lie side by side, read from the device: the vision tower's, in a graph.

Segments are cut into tiles of rows, none of which has rows of two: whatever is in one segment, infinity and NaN
included, changes nothing in another. The grid is fixed; programs look for their tile, and those without one end.

A head's dimensions need not be a power of two: 72 are worked on as 64 and 16, of which 8 are not there.
"""
# ruff: noqa: N803

import triton
import triton.language as tl
from triton.language.extra import cuda

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load(base, offsets, rows_there, dims, HEAD_DIM: tl.constexpr, END: tl.constexpr, MASKED: tl.constexpr):
    """[rows, dims] at base + offsets; zeros for rows that are not there and from HEAD_DIM on. END: of dims."""
    if MASKED and END > HEAD_DIM:
        return tl.load(base + offsets, mask=rows_there & (dims < HEAD_DIM), other=0.0)
    if MASKED:
        return tl.load(base + offsets, mask=rows_there, other=0.0)
    if END > HEAD_DIM:
        return tl.load(base + offsets, mask=dims < HEAD_DIM, other=0.0)
    return tl.load(base + offsets)


@triton.jit
def _attend(
    first_q,
    rest_q,
    k,
    v,
    keys_there,
    first_k_offsets,
    rest_k_offsets,
    first_v_offsets,
    rest_v_offsets,
    first_dims,
    rest_dims,
    top,
    denominator,
    first_sums,
    rest_sums,
    scale,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax of a tile's rows after one more block of keys, which begins at k and v."""
    logits = tl.dot(
        first_q, _load(k, first_k_offsets, keys_there, first_dims, HEAD_DIM, FIRST, MASKED).T, input_precision="ieee"
    )
    if REST:
        rest_k = _load(k, rest_k_offsets, keys_there, rest_dims, HEAD_DIM, FIRST + REST, MASKED)
        logits = tl.dot(rest_q, rest_k.T, logits, input_precision="ieee")
    if MASKED:
        logits = tl.where(keys_there.T, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1) * scale)
    weights = tl.exp2(logits * scale - new_top[:, None])
    fade = tl.exp2(top - new_top)
    denominator = denominator * fade + tl.sum(weights, 1)
    weights = weights.to(first_q.dtype)
    first_v = _load(v, first_v_offsets, keys_there, first_dims, HEAD_DIM, FIRST, MASKED)
    first_sums = tl.dot(weights, first_v, first_sums * fade[:, None], input_precision="ieee")
    if REST:
        rest_v = _load(v, rest_v_offsets, keys_there, rest_dims, HEAD_DIM, FIRST + REST, MASKED)
        rest_sums = tl.dot(weights, rest_v, rest_sums * fade[:, None], input_precision="ieee")
    return new_top, denominator, first_sums, rest_sums


@triton.jit(do_not_specialize=["num_segments"], do_not_specialize_on_alignment=["starts"])
def attend_segments(
    q,
    k,
    v,
    starts,
    out,
    num_segments,
    q_stride,
    k_stride,
    v_stride,
    scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    SEGMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of a segment's rows and one head.

    q, k, v [rows, HEADS, HEAD_DIM] with rows so many elements apart; out the same, contiguous. starts int32
    [num_segments + 1], num_segments <= SEGMENTS; a segment may have no rows. FIRST + REST >= HEAD_DIM, powers of two
    of 16 or more; REST may be 0. Grid (at least the tiles of all segments, HEADS).
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    segments = tl.arange(0, SEGMENTS)
    known = segments < num_segments
    begins = tl.load(starts + segments, mask=known, other=0)
    ends = tl.load(starts + 1 + segments, mask=known, other=0)
    tiles = (ends - begins + BLOCK_ROWS - 1) // BLOCK_ROWS
    tiles_end = tl.cumsum(tiles, 0)
    item = tl.program_id(0)
    if item >= tl.sum(tiles):
        return
    mine = (tiles_end > item) & (tiles_end - tiles <= item)
    begin = tl.sum(tl.where(mine, begins, 0))
    end = tl.sum(tl.where(mine, ends, 0))
    first_row = begin + (item - tl.sum(tl.where(mine, tiles_end - tiles, 0))) * BLOCK_ROWS

    head = tl.program_id(1) * HEAD_DIM
    rows = tl.arange(0, BLOCK_ROWS)[:, None]
    rows_there = first_row + rows < end
    first_dims = tl.arange(0, FIRST)[None, :]
    rest_dims = FIRST + tl.arange(0, REST if REST else 16)[None, :]
    tile = q + first_row.to(tl.int64) * q_stride + head
    first_q = _load(tile, rows * q_stride + first_dims, rows_there, first_dims, HEAD_DIM, FIRST, True)
    rest_q = first_q
    if REST:
        rest_q = _load(tile, rows * q_stride + rest_dims, rows_there, rest_dims, HEAD_DIM, FIRST + REST, True)

    keys = tl.arange(0, BLOCK_KEYS)[:, None]
    first_k_offsets, rest_k_offsets = keys * k_stride + first_dims, keys * k_stride + rest_dims
    first_v_offsets, rest_v_offsets = keys * v_stride + first_dims, keys * v_stride + rest_dims
    k += begin.to(tl.int64) * k_stride + head
    v += begin.to(tl.int64) * v_stride + head
    scale *= LOG2_E
    top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    denominator = tl.zeros([BLOCK_ROWS], tl.float32)
    first_sums = tl.zeros([BLOCK_ROWS, FIRST], tl.float32)
    rest_sums = tl.zeros([BLOCK_ROWS, REST if REST else 16], tl.float32)
    whole = (end - begin) // BLOCK_KEYS
    for _ in tl.range(0, whole):
        top, denominator, first_sums, rest_sums = _attend(
            first_q,
            rest_q,
            k,
            v,
            keys < BLOCK_KEYS,
            first_k_offsets,
            rest_k_offsets,
            first_v_offsets,
            rest_v_offsets,
            first_dims,
            rest_dims,
            top,
            denominator,
            first_sums,
            rest_sums,
            scale,
            HEAD_DIM,
            FIRST,
            REST,
            False,
        )
        k += BLOCK_KEYS * k_stride
        v += BLOCK_KEYS * v_stride
    if begin + whole * BLOCK_KEYS < end:
        top, denominator, first_sums, rest_sums = _attend(
            first_q,
            rest_q,
            k,
            v,
            begin + whole * BLOCK_KEYS + keys < end,
            first_k_offsets,
            rest_k_offsets,
            first_v_offsets,
            rest_v_offsets,
            first_dims,
            rest_dims,
            top,
            denominator,
            first_sums,
            rest_sums,
            scale,
            HEAD_DIM,
            FIRST,
            REST,
            True,
        )

    target = out + first_row.to(tl.int64) * (HEADS * HEAD_DIM) + head + rows * (HEADS * HEAD_DIM)
    first_result = (first_sums / denominator[:, None]).to(out.dtype.element_ty)
    tl.store(target + first_dims, first_result, mask=rows_there & (first_dims < HEAD_DIM))
    if REST:
        rest_result = (rest_sums / denominator[:, None]).to(out.dtype.element_ty)
        tl.store(target + rest_dims, rest_result, mask=rows_there & (rest_dims < HEAD_DIM))
