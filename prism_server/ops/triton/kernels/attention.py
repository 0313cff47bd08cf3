"""Causal attention over paged K and V: rows of any number of sequences, each over its own pages, in one launch.

Query heads that share a KV head are laid beside each other as further query rows, so K and V are read once for them.
A sequence's query rows are cut into tiles and its context into pieces; programs compute (tile, piece, KV head) after
(tile, piece, KV head), and the last to finish a tile adds its pieces up, always in their order. How a sequence is cut
depends on its own lengths only: what comes out does not depend on what else is in the batch.

Starts and lengths are read on the device: the grid is fixed, programs look for what there is to do, and sequences
without rows cost nothing. A launch takes the sequences with so many query rows, each class with a tile of its size.

A row is worked on in two halves: of FP8 the even and the odd columns, otherwise the first and the last ones.

FP8: a row of K is `payload * scale`. K's scales multiply the logits. V's are folded into the probabilities as
logarithms, `p' = exp2(logit + log2(scale) - running maximum of that)`: the products' largest factor is one, whatever
the scales are, and `sum(p' / scale)` is the denominator. Products are half-precision: E4M3 fits in exactly.
"""
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

NO_LOGIT = tl.constexpr(-1.0e30)
"""Where a running maximum starts: below any logit, and finite, so that no difference of two is NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _unpack_pairs(pairs, NATIVE: tl.constexpr):
    """int16, two E4M3 numbers each -> the lower ones and the upper ones, float16.

    Pairs are what the tensor cores' operands consist of: they come out of shared memory as 16-bit matrices, transposed
    ones too, and one permutation of a register's four bytes puts each number where its operand wants it.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 lower, upper;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {lower, upper}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    # An E4M3 number's bits, sign apart, are a half-precision number's upper ones shifted by one, and 2^-8 of it.
    lower = ((pairs << 8) & -32768) | ((pairs << 7) & 0x3F80)
    upper = (pairs & -32768) | ((pairs >> 1) & 0x3F80)
    return lower.to(tl.float16, bitcast=True) * 256.0, upper.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _log2_and_reciprocal(x, NATIVE: tl.constexpr):
    """Of positive float32 numbers; natively one instruction each, off by some 2^-22 of the result."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $2; rcp.approx.ftz.f32 $1, $2;",
            "=&r,=r,r",
            [x],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return tl.log2(x), 1.0 / x


@triton.jit
def _halves(rows, FP8: tl.constexpr):
    """[n, HEAD_DIM] -> two of [n, HEAD_DIM / 2]."""
    HALF: tl.constexpr = rows.shape[1] // 2
    if FP8:
        return tl.split(tl.reshape(rows, [rows.shape[0], HALF, 2]))
    return tl.split(tl.permute(tl.reshape(rows, [rows.shape[0], 2, HALF]), [0, 2, 1]))


@triton.jit
def _whole(left, right, FP8: tl.constexpr):
    """The inverse of `_halves`."""
    pairs = tl.join(left, right)
    if not FP8:
        pairs = tl.permute(pairs, [0, 2, 1])
    return tl.reshape(pairs, [left.shape[0], left.shape[1] * 2])


@triton.jit
def _cut(
    contexts,
    rows,
    PIECE_TOKENS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Tokens of a piece: PIECE_TOKENS until there would be too many pieces for a sequence of so many query rows."""
    max_pieces = tl.minimum(tl.maximum(PARTIAL_ROWS // tl.maximum(rows, 1), 1), MAX_PIECES)
    blocks = tl.cdiv(tl.cdiv(contexts, max_pieces), BLOCK_TOKENS)
    return tl.maximum(PIECE_TOKENS, blocks * BLOCK_TOKENS)


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride", "layer", "num_pages", "window_begin", "window_rows"],
    do_not_specialize_on_alignment=["query_starts", "context_lengths", "block_tables", "table_rows"],
)
def paged_attention(
    queries,  # [rows, HEADS, HEAD_DIM]
    out,  # like queries
    payload,  # [layer, 2, page, KV_HEADS, PAGE_TOKENS, HEAD_DIM]; FP8 as int16 pairs [..., HEAD_DIM / 2]
    scales,  # float32 [layer, 2, page, KV_HEADS, PAGE_TOKENS], of FP8
    query_starts,
    context_lengths,
    block_tables,
    table_rows,
    partial_sums,  # float32 [partial rows, HEADS, HEAD_DIM]; a sequence has rows * pieces of them
    partial_stats,  # float32 [partial rows, HEADS, 2]: running maximum, denominator
    arrivals,  # int32 [rows, KV_HEADS], zero before and after
    num_sequences,
    table_stride,
    layer,
    num_pages,
    window_begin,  # this launch takes the sequences whose partial rows begin in the window,
    window_rows,  # and keeps them from the workspace's begin
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    FP8: tl.constexpr,
    PRODUCT: tl.constexpr,  # dtype of the products' factors
    MAX_SEQUENCES: tl.constexpr,
    MIN_QUERY_ROWS: tl.constexpr,
    MAX_QUERY_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PIECE_TOKENS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,  # on a GPU that knows E4M3: its own instructions
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TILE_TOKENS: tl.constexpr = BLOCK_ROWS // GROUP
    HALF: tl.constexpr = HEAD_DIM // 2
    ROW: tl.constexpr = HALF if FP8 else HEAD_DIM  # elements of `payload` in a row
    PAGE_ROWS: tl.constexpr = KV_HEADS * PAGE_TOKENS
    PRECISION: tl.constexpr = "tf32" if PRODUCT.primitive_bitwidth < 32 else "ieee"

    # What there is to do, for all sequences at once.
    sequences = tl.arange(0, MAX_SEQUENCES)
    there = sequences < num_sequences
    all_starts = tl.load(query_starts + sequences, mask=there, other=0)
    all_rows = tl.load(query_starts + sequences + 1, mask=there, other=0) - all_starts
    all_contexts = tl.load(context_lengths + sequences, mask=there, other=0)
    wanted = (all_rows >= MIN_QUERY_ROWS) & (all_rows <= MAX_QUERY_ROWS)
    all_pieces = tl.cdiv(
        all_contexts, _cut(all_contexts, all_rows, PIECE_TOKENS, MAX_PIECES, PARTIAL_ROWS, BLOCK_TOKENS)
    )
    all_partials = tl.where(wanted & (all_pieces > 1), all_rows * all_pieces, 0)
    partials_begin = tl.cumsum(all_partials) - all_partials - window_begin
    wanted = wanted & (partials_begin >= 0) & (partials_begin < window_rows)
    all_items = tl.where(wanted, tl.cdiv(all_rows, TILE_TOKENS) * all_pieces * KV_HEADS, 0)
    items_end = tl.cumsum(all_items)
    num_items = tl.sum(all_items)

    k_first_row = (layer * 2).to(tl.int64) * num_pages * PAGE_ROWS
    v_first_row = k_first_row + num_pages.to(tl.int64) * PAGE_ROWS
    tile_rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    half = tl.arange(0, HALF)
    block = tl.arange(0, BLOCK_TOKENS)
    block_offsets = block[:, None] * ROW + half[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()

    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        # Which item this is: sequence, query tile, piece, KV head.
        before = items_end <= item
        sequence = tl.sum(before.to(tl.int32))
        item_in_sequence = item - tl.max(tl.where(before, items_end, 0))
        start = tl.load(query_starts + sequence)
        rows = tl.load(query_starts + sequence + 1) - start
        context = tl.load(context_lengths + sequence)
        table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        piece_tokens = _cut(context, rows, PIECE_TOKENS, MAX_PIECES, PARTIAL_ROWS, BLOCK_TOKENS)
        num_pieces = tl.cdiv(context, piece_tokens)
        num_tiles = tl.cdiv(rows, TILE_TOKENS)
        kv_head = item_in_sequence % KV_HEADS
        tile = num_tiles - 1 - item_in_sequence // KV_HEADS % num_tiles  # the longest first
        piece = item_in_sequence // KV_HEADS // num_tiles

        tokens = tile * TILE_TOKENS + tile_rows // GROUP
        exists = (tokens < rows)[:, None]
        row_heads = ((start + tokens) * HEADS + kv_head * GROUP + tile_rows % GROUP).to(tl.int64)
        seen = context - rows + tokens + 1  # tokens of the context that a row sees
        begin = piece * piece_tokens
        end = tl.minimum(context - rows + (tile + 1) * TILE_TOKENS, tl.minimum(begin + piece_tokens, context))

        q = tl.load(queries + row_heads[:, None] * HEAD_DIM + dims[None, :], mask=exists, other=0.0)
        row_scale = tl.full([BLOCK_ROWS], LOG2_E, tl.float32) * scale
        if FP8:
            # By a power of two, the row's largest becomes 1 to 2: nothing overflows, and bfloat16 loses nothing.
            wide = q.to(tl.float32)
            absmax = tl.minimum(tl.maximum(tl.max(tl.abs(wide), 1), 1.0e-30), 1.0e30)
            power = (absmax.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            row_scale *= power
            q = wide / power[:, None]
        left_q, right_q = _halves(q.to(PRODUCT), FP8)

        top = tl.full([BLOCK_ROWS], NO_LOGIT, tl.float32)
        denominators = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)  # of columns; added up after the loop
        left = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
        right = tl.zeros([BLOCK_ROWS, HALF], tl.float32)
        next_page = tl.load(table + begin // PAGE_TOKENS)
        for position in tl.range(begin, end, BLOCK_TOKENS, num_stages=STAGES):
            columns = position + block
            stored = columns < context
            if BLOCK_TOKENS <= PAGE_TOKENS:
                first_row = (next_page * KV_HEADS + kv_head).to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
                next_page = tl.load(table + tl.minimum(position + BLOCK_TOKENS, end - 1) // PAGE_TOKENS)
                k_block = payload + (k_first_row + first_row) * ROW + block_offsets
                v_block = payload + (v_first_row + first_row) * ROW + block_offsets
                k_scales = scales + (k_first_row + first_row) + block
                v_scales = scales + (v_first_row + first_row) + block
            else:
                pages = tl.load(table + columns // PAGE_TOKENS, mask=stored, other=0)
                kv_rows = (pages * KV_HEADS + kv_head).to(tl.int64) * PAGE_TOKENS + columns % PAGE_TOKENS
                k_block = payload + (k_first_row + kv_rows)[:, None] * ROW + half[None, :]
                v_block = payload + (v_first_row + kv_rows)[:, None] * ROW + half[None, :]
                k_scales = scales + k_first_row + kv_rows
                v_scales = scales + v_first_row + kv_rows

            if FP8:
                left_k, right_k = _unpack_pairs(tl.load(k_block, mask=stored[:, None], other=0), NATIVE)
            else:
                left_k = tl.load(k_block, mask=stored[:, None], other=0.0).to(PRODUCT)
                right_k = tl.load(k_block + HALF, mask=stored[:, None], other=0.0).to(PRODUCT)
            logits = tl.dot(left_q, left_k.T, input_precision=PRECISION)
            logits = tl.dot(right_q, right_k.T, logits, input_precision=PRECISION) * row_scale[:, None]
            if FP8:
                # Unmasked, for wide loads: what lies beyond the context goes with the logits that are not seen.
                k_scale = tl.load(k_scales)
                v_scale = tl.where(stored, tl.load(v_scales), 1.0)
                v_bias, v_weight = _log2_and_reciprocal(v_scale, NATIVE)
                logits = tl.fma(logits, k_scale[None, :], v_bias[None, :])
            logits = tl.where(columns[None, :] < seen[:, None], logits, float("-inf"))

            new_top = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp2(logits - new_top[:, None])
            fade = tl.exp2(top - new_top)[:, None]
            top = new_top
            if FP8:
                denominators = tl.fma(weights, v_weight[None, :], denominators * fade)
                left_v, right_v = _unpack_pairs(tl.load(v_block, mask=stored[:, None], other=0), NATIVE)
            else:
                denominators = denominators * fade + weights
                left_v = tl.load(v_block, mask=stored[:, None], other=0.0).to(PRODUCT)
                right_v = tl.load(v_block + HALF, mask=stored[:, None], other=0.0).to(PRODUCT)
            weights = weights.to(PRODUCT)
            left = tl.dot(weights, left_v, left * fade, input_precision=PRECISION)
            right = tl.dot(weights, right_v, right * fade, input_precision=PRECISION)

        sums = _whole(left, right, FP8)
        denominator = tl.sum(denominators, 1)
        if num_pieces == 1:
            result = (sums / denominator[:, None]).to(out.dtype.element_ty)
            tl.store(out + row_heads[:, None] * HEAD_DIM + dims[None, :], result, mask=exists)
        else:
            # Each program keeps its piece; the last of a tile adds all of them up, in their order.
            first_partial = tl.sum(tl.where(sequences == sequence, partials_begin, 0))
            part_rows = ((first_partial + tokens) * HEADS + kv_head * GROUP + tile_rows % GROUP).to(tl.int64)
            part_stride = (rows * HEADS).to(tl.int64)
            here = part_rows + piece * part_stride
            tl.store(partial_sums + here[:, None] * HEAD_DIM + dims[None, :], sums, mask=exists)
            tl.store(partial_stats + here * 2, top, mask=tokens < rows)
            tl.store(partial_stats + here * 2 + 1, denominator, mask=tokens < rows)
            tl.debug_barrier()  # no thread's stores come after the arrival
            arrival = arrivals + (start + tile * TILE_TOKENS).to(tl.int64) * KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1) == num_pieces - 1:
                tl.store(arrival, 0)
                top = tl.full([BLOCK_ROWS], NO_LOGIT, tl.float32)
                denominator = tl.zeros([BLOCK_ROWS], tl.float32)
                sums = tl.zeros([BLOCK_ROWS, HEAD_DIM], tl.float32)
                for _ in tl.range(0, num_pieces, loop_unroll_factor=2):
                    stats = partial_stats + part_rows * 2
                    parts = partial_sums + part_rows[:, None] * HEAD_DIM + dims[None, :]
                    part_top = tl.load(stats, mask=tokens < rows, other=NO_LOGIT, cache_modifier=".cg")
                    part = tl.load(stats + 1, mask=tokens < rows, other=1.0, cache_modifier=".cg")
                    part_sums = tl.load(parts, mask=exists, other=0.0, cache_modifier=".cg")
                    part_rows += part_stride
                    new_top = tl.maximum(top, part_top)
                    fade = tl.exp2(top - new_top)
                    share = tl.exp2(part_top - new_top)
                    top = new_top
                    denominator = denominator * fade + part * share
                    sums = sums * fade[:, None] + part_sums * share[:, None]
                result = (sums / denominator[:, None]).to(out.dtype.element_ty)
                tl.store(out + row_heads[:, None] * HEAD_DIM + dims[None, :], result, mask=exists)
