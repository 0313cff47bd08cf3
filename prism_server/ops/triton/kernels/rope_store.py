"""What happens to Q, K and V between their product and attention: norm, rotation, and the rows' way into the pages."""
# ruff: noqa: N803, N806

import triton
import triton.language as tl
from triton.language.extra import cuda

E4M3_MAX = tl.constexpr(448.0)
MIN_ABSMAX = tl.constexpr(2.0**-20)


@triton.jit
def to_e4m3(values):
    """float32 -> E4M3FN bytes, rounded to the nearest, ties to even; beyond the largest number and NaN: NaN.

    In integers, so that every GPU and the interpreter give the same bytes.
    """
    bits = values.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43F00000)  # 480, where NaN stands
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the step is 2^-9, as that of numbers beside 2^14: the sum rounds.
    subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _normalise(values, factor, weight, DTYPE: tl.constexpr):
    """Rounded where plain torch rounds: after the root mean square, after the weight."""
    return ((values * factor).to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)


@triton.jit
def _store_row(first, second, payload, scales, block, half, HEAD_DIM: tl.constexpr, FP8: tl.constexpr):
    """Halves [heads, head_dim / 2] float32 of rows to their places `block` int64 [heads] in the pool."""
    target = payload + block[:, None] * HEAD_DIM + half[None, :]
    if FP8:
        absmax = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
        broken = tl.max(((first != first) | (second != second)).to(tl.int32), axis=1)  # the maximum above skips NaN
        scale = tl.div_rn(tl.maximum(absmax, MIN_ABSMAX), tl.full(absmax.shape, E4M3_MAX, tl.float32))
        scale = tl.where(broken != 0, float("nan"), scale)
        wide = scale[:, None] + tl.zeros_like(first)
        tl.store(scales + block, scale)
        tl.store(target, to_e4m3(tl.div_rn(first, wide)))
        tl.store(target + HEAD_DIM // 2, to_e4m3(tl.div_rn(second, wide)))
    else:
        tl.store(target, first.to(payload.dtype.element_ty))
        tl.store(target + HEAD_DIM // 2, second.to(payload.dtype.element_ty))


@triton.jit(do_not_specialize=["page_index", "slot_index", "layer", "eps"])
def norm_rope_store(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    page_index,
    slot_index,
    q_out,
    payload,
    scales,
    num_pages,
    layer,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row's tile of heads: Q is normed, rotated and written out, K so too but stored in its page, V stored.

    qkv [rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM]; cos, sin float32 [rows, HEAD_DIM / 2]; q_out [rows, HEADS, HEAD_DIM].
    payload [layer, 2, num_pages, KV_HEADS, PAGE_TOKENS, HEAD_DIM] (FP8: bytes, with scales float32 but for the last
    axis). A row of page -1 is not stored. TILE_HEADS divides HEADS and KV_HEADS. Grid (rows, all heads / TILE_HEADS).
    """
    if PDL:
        cuda.gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * TILE_HEADS
    is_q = first_head < HEADS
    is_v = first_head >= HEADS + KV_HEADS
    heads = first_head + tl.arange(0, TILE_HEADS)
    half = tl.arange(0, HALF)
    page = tl.load(page_index + row)
    slot = tl.load(slot_index + row)
    first_weight = tl.where(is_q, tl.load(q_norm + half), tl.load(k_norm + half)).to(tl.float32)
    second_weight = tl.where(is_q, tl.load(q_norm + HALF + half), tl.load(k_norm + HALF + half)).to(tl.float32)
    if PDL:
        cuda.gdc_wait()
    angle_cos = tl.load(cos + row * HALF + half)[None, :]
    angle_sin = tl.load(sin + row * HALF + half)[None, :]
    start = qkv + row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM) + heads[:, None] * HEAD_DIM + half[None, :]
    raw_first = tl.load(start).to(tl.float32)
    raw_second = tl.load(start + HALF).to(tl.float32)
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    square = tl.sum(raw_first * raw_first, axis=1) + tl.sum(raw_second * raw_second, axis=1)
    factor = tl.rsqrt(square / HEAD_DIM + eps)[:, None]
    first = _normalise(raw_first, factor, first_weight[None, :], DTYPE)
    second = _normalise(raw_second, factor, second_weight[None, :], DTYPE)
    turned_first = (first * angle_cos - second * angle_sin).to(DTYPE)
    turned_second = (second * angle_cos + first * angle_sin).to(DTYPE)
    if is_q:
        out = q_out + row * (HEADS * HEAD_DIM) + heads[:, None] * HEAD_DIM + half[None, :]
        tl.store(out, turned_first)
        tl.store(out + HALF, turned_second)
    elif page >= 0:
        side = is_v.to(tl.int32)
        kv_head = heads - HEADS - side * KV_HEADS
        plane = (layer * 2 + side).to(tl.int64) * num_pages + page
        block = (plane * KV_HEADS + kv_head) * PAGE_TOKENS + slot
        stored_first = tl.where(is_v, raw_first, turned_first.to(tl.float32))
        stored_second = tl.where(is_v, raw_second, turned_second.to(tl.float32))
        _store_row(stored_first, stored_second, payload, scales, block, half, HEAD_DIM, FP8)


@triton.jit
def rotate_heads(
    x,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Half-split rotation: x [rows, HEADS, HEAD_DIM] with strides, its last axis contiguous -> out, contiguous.

    cos, sin float32 [rows, HEAD_DIM / 2]; TILE_HALF >= HEAD_DIM / 2. Grid (rows, ceil(HEADS / TILE_HEADS)).
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    half = tl.arange(0, TILE_HALF)[None, :]
    inside = (heads < HEADS) & (half < HALF)
    angle_cos = tl.load(cos + row * HALF + half, mask=half < HALF, other=0.0)
    angle_sin = tl.load(sin + row * HALF + half, mask=half < HALF, other=0.0)
    start = x + row * row_stride + heads * head_stride + half
    first = tl.load(start, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + HALF, mask=inside, other=0.0).to(tl.float32)
    target = out + row * (HEADS * HEAD_DIM) + heads * HEAD_DIM + half
    tl.store(target, (first * angle_cos - second * angle_sin).to(out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, (second * angle_cos + first * angle_sin).to(out.dtype.element_ty), mask=inside)
