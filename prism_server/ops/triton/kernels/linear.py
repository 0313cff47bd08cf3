"""Products of few rows with large weights: bound by the weights' bytes, each of which is read once.

The weight is the left operand of the tensor cores, so padding the rows costs no time. A program owns BLOCK_N outputs
(SWIGLU: BLOCK_N of gate and the same of up) and a SPLIT_K-th of the inputs, which it walks in order with a float32
accumulator: the order of sums does not depend on the number of rows.
"""
# ruff: noqa: N803, N806

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def _prefetch_rows(rows, weight, depth, first_column, num_columns, PARTS: tl.constexpr):
    """Ask the L2 for `num_columns` bf16 of some rows of the weight; a thread asks for one run of bytes.

    Each row stands PARTS times in `rows` int32 [n], side by side, so that there are as many elements as threads.
    """
    run = num_columns // PARTS
    start = weight + rows.to(tl.int64) * depth + first_column + tl.arange(0, rows.shape[0]) % PARTS * run
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [start.to(tl.int64, bitcast=True), run * 2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _multiply_add(weight_tile, x_tile, sums, WIDE: tl.constexpr):
    """sums [BLOCK_N, ROWS] + weight_tile [BLOCK_N, BLOCK_K] @ x_tile [ROWS, BLOCK_K].T"""
    if WIDE:  # the interpreter's dot does not know bf16
        weight_tile = weight_tile.to(tl.float32)
        x_tile = x_tile.to(tl.float32)
    return tl.dot(weight_tile, x_tile.T, sums)


@triton.jit
def _finish(gate, up, residual, out_tile, inside, SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr):
    """Epilogue of [BLOCK_N, ROWS] float32 sums: SwiGLU or residual, then one rounding to the type of the output."""
    if SWIGLU:
        gate = gate / (1.0 + tl.exp(-gate)) * up
    if RESIDUAL:
        gate += residual.to(tl.float32)
    tl.store(out_tile, gate.to(out_tile.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "eps", "prefetch_columns"])
def skinny_product(
    x,
    norm,
    weight,
    weight_tiles,
    residual,
    out,
    partial,
    arrivals,
    num_rows,
    num_columns,
    depth,
    eps,
    prefetch_columns,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    TMA: tl.constexpr,
    PREFETCH_PARTS: tl.constexpr,
    PDL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """x [num_rows, depth] bf16 times weight [num_columns, depth] (SWIGLU: [2 * num_columns, depth]), with a prologue
    and an epilogue, to out [num_rows, num_columns]; num_rows <= ROWS. Grid (ceil(num_columns / BLOCK_N), SPLIT_K).

    NORM: rows of x are multiplied by norm [depth] on their way in, the sums by 1 / rms(x) on their way out.
    RESIDUAL: residual [num_rows, num_columns] is added. `weight_tiles` is the weight again, for TMA its descriptor of
    [BLOCK_N, BLOCK_K] tiles. SPLIT_K > 1: partial float32 [tiles, SPLIT_K, 1 or 2, BLOCK_N, ROWS] and arrivals
    int32 [tiles], zero before and after: the last program of a tile adds the parts, in order. BLOCK_K * SPLIT_K
    divides depth.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    part_depth = depth // SPLIT_K
    begin = part * part_depth
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.arange(0, ROWS)
    if PDL:
        cuda.gdc_launch_dependents()
        if prefetch_columns > 0:
            spread = tile * BLOCK_N + tl.arange(0, BLOCK_N * PREFETCH_PARTS) // PREFETCH_PARTS
            spread = tl.minimum(spread, num_columns - 1)
            _prefetch_rows(spread, weight, depth, begin, prefetch_columns, PREFETCH_PARTS)
            if SWIGLU:
                _prefetch_rows(spread + num_columns, weight, depth, begin, prefetch_columns, PREFETCH_PARTS)
        cuda.gdc_wait()  # nothing of the kernel before is read, and nothing written, before here
    places = rows[None, :] * num_columns.to(tl.int64) + columns[:, None]
    inside = (columns[:, None] < num_columns) & (rows[None, :] < num_rows)
    added = tl.zeros((BLOCK_N, ROWS), out.dtype.element_ty)
    if RESIDUAL and SPLIT_K == 1:
        added = tl.load(residual + places, mask=inside, other=0.0)  # early: nothing waits for it at the end

    inner = tl.arange(0, BLOCK_K)
    x_tiles = x + rows[:, None] * depth + inner[None, :]
    x_inside = rows[:, None] < num_rows
    weight_rows = tl.minimum(columns, num_columns - 1)[:, None].to(tl.int64)  # no mask: what is beyond is not stored
    gate_rows = weight + weight_rows * depth + inner[None, :]
    up_rows = weight + (weight_rows + num_columns) * depth + inner[None, :]
    gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
    up = tl.zeros((BLOCK_N, ROWS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_K), tl.float32)
    factor = tl.zeros((BLOCK_K,), tl.float32)
    if NORM:
        factor = tl.load(norm + inner).to(tl.float32)
    for k in range(begin, begin + part_depth, BLOCK_K):
        x_tile = tl.load(x_tiles + k, mask=x_inside, other=0.0)
        if NORM:
            wide = x_tile.to(tl.float32)
            squares += wide * wide
            x_tile = (wide * factor[None, :]).to(x_tile.dtype)
            following = tl.minimum(k + BLOCK_K, depth - BLOCK_K)  # a round ahead: nothing waits for it
            factor = tl.load(norm + following + inner).to(tl.float32)
        if TMA:
            gate_tile = weight_tiles.load([tile * BLOCK_N, k])
        else:
            gate_tile = tl.load(gate_rows + k)
        gate = _multiply_add(gate_tile, x_tile, gate, WIDE)
        if SWIGLU:
            if TMA:
                up_tile = weight_tiles.load([num_columns + tile * BLOCK_N, k])
            else:
                up_tile = tl.load(up_rows + k)
            up = _multiply_add(up_tile, x_tile, up, WIDE)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / depth + eps)[None, :]
        gate *= scale
        up *= scale
    if SPLIT_K == 1:
        _finish(gate, up, added, out + places, inside, SWIGLU, RESIDUAL)
    else:
        SIDES: tl.constexpr = 2 if SWIGLU else 1
        SIZE: tl.constexpr = BLOCK_N * ROWS
        of_tile = partial + tile.to(tl.int64) * (SPLIT_K * SIDES * SIZE)
        of_tile += tl.arange(0, BLOCK_N)[:, None] * ROWS + rows[None, :]
        tl.store(of_tile + part * (SIDES * SIZE), gate)
        if SWIGLU:
            tl.store(of_tile + part * (SIDES * SIZE) + SIZE, up)
        tl.debug_barrier()  # every thread's part is written before this program counts as arrived
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(arrivals + tile, 0)
            gate = tl.zeros((BLOCK_N, ROWS), tl.float32)
            up = tl.zeros((BLOCK_N, ROWS), tl.float32)
            for other in range(SPLIT_K):
                gate += tl.load(of_tile + other * (SIDES * SIZE), cache_modifier=".cg")
                if SWIGLU:
                    up += tl.load(of_tile + other * (SIDES * SIZE) + SIZE, cache_modifier=".cg")
            if RESIDUAL:
                added = tl.load(residual + places, mask=inside, other=0.0)
            _finish(gate, up, added, out + places, inside, SWIGLU, RESIDUAL)


@triton.jit(do_not_specialize=["eps"])
def rms_norm_rows(x, norm, out, depth, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [rows, depth] = x over its root mean square, times norm [depth]; rounded once. Grid (rows,)."""
    if PDL:
        cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * depth
    inner = tl.arange(0, BLOCK)
    inside = inner < depth
    factor = tl.load(norm + inner, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
    wide = tl.load(x + row + inner, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / depth + eps)
    tl.store(out + row + inner, (wide * scale * factor).to(out.dtype.element_ty), mask=inside)
