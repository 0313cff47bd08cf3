"""The likeliest token of each row without its logits: a product with the head's FP8 copy that keeps the best of every
tile, then the exact logits of the best of these.

A tile's tokens are ranked by an int32: the logit of the copy as an integer of the same order, whose last bits are
replaced by the complement of the token's number in the tile. So they are distinct, and of equals the lower id is first.
"""
# ruff: noqa: N803

import triton
import triton.language as tl
from triton.language.extra import cuda

from prism_server.ops.triton.kernels.attention_work import unpack_pairs
from prism_server.ops.triton.kernels.linear import _multiply_add
from prism_server.ops.triton.kernels.select import ID_BITS, LAST_ID, LOWEST_PLACE, _id_of, _logit_key, _place

LOWEST_KEY = tl.constexpr(-(2**31))
LARGEST_HALF = tl.constexpr(256.0)
"""What the largest number of a float16 row becomes: sums stay far from both ends of the range."""
SMALLEST = tl.constexpr(2.0**-100)


@triton.jit(do_not_specialize=["eps"])
def norm_rows_for_candidates(x, norm, out, halves, depth, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out [rows, depth] as `rms_norm_rows`; halves float16: each row of it again, times a factor of its own, which the
    order of the row's logits does not depend on. Grid (rows,)."""
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
    normed = (wide * scale * factor).to(out.dtype.element_ty)
    tl.store(out + row + inner, normed, mask=inside)
    normed = normed.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(normed)), SMALLEST)
    tl.store(halves + row + inner, (normed / largest * LARGEST_HALF).to(tl.float16), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def best_of_tiles(
    x,
    pairs,
    pair_tiles,
    scales,
    keys,
    num_rows,
    vocab_size,
    num_pairs,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KEPT: tl.constexpr,
    TMA: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """keys int32 [num_rows, tiles, KEPT]: of each tile of BLOCK_N tokens the likeliest, best first. Grid (tiles,).

    x float16 [num_rows, 2 * num_pairs] times the copy of a head: pairs int16 [vocab_size, num_pairs], scales float32
    [vocab_size], see `Fp8Head`. `pair_tiles` is `pairs` again, for TMA its descriptor of [BLOCK_N, BLOCK_K] tiles.
    num_rows <= ROWS; BLOCK_K divides num_pairs.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    local = tl.arange(0, BLOCK_N)
    tokens = tile * BLOCK_N + local
    inside = tokens < vocab_size
    token_scales = tl.load(scales + tokens, mask=inside, other=0.0)
    if PDL:
        cuda.gdc_wait()
    rows = tl.arange(0, ROWS)
    inner = tl.arange(0, BLOCK_K)
    x_tiles = x + rows[:, None] * (2 * num_pairs) + inner[None, :]
    x_inside = rows[:, None] < num_rows
    pair_rows = tl.minimum(tokens, vocab_size - 1)[:, None].to(tl.int64)  # no mask: what is beyond is not kept
    pair_places = pairs + pair_rows * num_pairs + inner[None, :]
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    for k in range(0, num_pairs, BLOCK_K):
        if TMA:
            pair_tile = pair_tiles.load([tile * BLOCK_N, k])
        else:
            pair_tile = tl.load(pair_places + k)
        lower_x = tl.load(x_tiles + k, mask=x_inside, other=0.0)
        upper_x = tl.load(x_tiles + num_pairs + k, mask=x_inside, other=0.0)
        lower, upper = unpack_pairs(pair_tile, NATIVE)
        sums = tl.dot(lower, lower_x.T, sums)
        sums = tl.dot(upper, upper_x.T, sums)
    key = (_logit_key(sums * token_scales[:, None]) & -BLOCK_N) | (BLOCK_N - 1 - local)[:, None]
    key = tl.where(inside[:, None], key, LOWEST_KEY)
    kept = keys + (rows * tl.num_programs(0) + tile) * KEPT
    for place in tl.static_range(KEPT):
        best = tl.max(key, axis=0)
        tl.store(kept + place, best, mask=rows < num_rows)
        key = tl.where(key == best[None, :], LOWEST_KEY, key)


@triton.jit
def best_of_groups(
    keys,
    x,
    head,
    parts,
    num_tiles,
    group_tiles,
    vocab_size,
    depth,
    KEPT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """parts int64 [rows, groups]: the first place, by the head itself, among the KEPT likeliest tokens of each group of
    tiles. Grid (rows, groups), groups * group_tiles >= num_tiles.

    keys as `best_of_tiles` leaves them; x [rows, depth], head [vocab_size, depth]; BLOCK >= group_tiles * KEPT; BLOCK_K
    divides depth. The logits are those of the head's product, in its order of sums: the candidates are the first of
    SLOTS rows of a tile of its tensor cores, x is the first of COLUMNS columns, and the others are zero.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BLOCK)
    numbers = tl.program_id(1) * group_tiles * KEPT + entries
    inside = (entries < group_tiles * KEPT) & (numbers < num_tiles * KEPT)
    found = tl.load(keys + row * num_tiles * KEPT + numbers, mask=inside, other=0)
    ids = numbers // KEPT * BLOCK_N + BLOCK_N - 1 - (found & (BLOCK_N - 1))
    places = ((found & -BLOCK_N).to(tl.int64) << ID_BITS) | (ids ^ LAST_ID).to(tl.int64)
    places = tl.where(inside, places, LOWEST_PLACE)
    slots = tl.arange(0, SLOTS)
    candidates = tl.zeros((SLOTS,), tl.int64)
    for slot in tl.static_range(KEPT):
        best = tl.max(places)
        likely = tl.minimum(_id_of(best), vocab_size - 1)  # of a group of fewer tokens: the last one, once more
        candidates = tl.where(slots == slot, likely, candidates)
        places = tl.where(places == best, LOWEST_PLACE, places)

    inner = tl.arange(0, BLOCK_K)
    columns = tl.arange(0, COLUMNS)
    weight_rows = head + candidates[:, None] * depth + inner[None, :]
    x_row = x + row * depth + columns[:, None] * 0 + inner[None, :]
    sums = tl.zeros((SLOTS, COLUMNS), tl.float32)
    for k in range(0, depth, BLOCK_K):
        weight_tile = tl.load(weight_rows + k, mask=slots[:, None] < KEPT, other=0.0)
        x_tile = tl.load(x_row + k, mask=columns[:, None] == 0, other=0.0)
        sums = _multiply_add(weight_tile, x_tile, sums, WIDE)
    logits = tl.sum(tl.where(columns[None, :] == 0, sums, 0.0), axis=1)
    exact = tl.where(slots < KEPT, _place(logits, candidates), LOWEST_PLACE)
    tl.store(parts + row * tl.num_programs(1) + tl.program_id(1), tl.max(exact))
