"""Causal attention over paged K and V: rows of any number of sequences, each over its own pages, in one launch.

Query heads that share a KV head are laid beside each other as further query rows, so K and V are read once for them.
A sequence's query rows are cut into tiles and its context into pieces; programs compute (tile, piece, KV head) after
(tile, piece, KV head); `add_pieces` makes one of them. How a sequence is cut depends on its own lengths only: what
comes out does not depend on what else is in the batch. (Where ops/cuda decodes instead, cuts depend on how many
sequences the batch is padded to, too.)

Starts and lengths are read on the device: the grid is fixed, programs look for what there is to do, and sequences
without rows cost nothing. A launch takes the sequences with so many query rows, each class with a tile of its size.

FP8 pairs are worked on in two halves, the even and the odd columns.

FP8: a row of K is `payload * scale`. K's scales multiply the logits. V's are folded into the probabilities as
logarithms, `p' = exp2(logit + log2(scale) - running maximum of that)`: the products' largest factor is one, whatever
the scales are, and `sum(p' / scale)` is the denominator. Products are half-precision: E4M3 fits in exactly. Converting
a block takes as long as its products with 64 rows do: where several tiles read a page, `unpack_pages` does it once.
"""
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl

from prism_server.ops.triton.kernels.attention_work import (
    NO_LOGIT,
    cut,
    find,
    partials,
    unpack_pairs,
    value_of,
    wanted_sequences,
)

LOG2_E = tl.constexpr(1.4426950408889634)


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
def _halves(rows):
    """[n, HEAD_DIM] -> even and odd columns, [n, HEAD_DIM / 2] each."""
    return tl.split(tl.reshape(rows, [rows.shape[0], rows.shape[1] // 2, 2]))


@triton.jit(
    do_not_specialize=[
        "num_sequences",
        "least_pages",
        "most_pages",
        "pages_begin",
        "pages_window",
        "table_stride",
        "layer",
        "num_pages",
        "window_begin",
        "window_rows",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lengths", "block_tables", "table_rows"],
)
def paged_attention(
    queries,  # [rows, HEADS, HEAD_DIM]
    out,  # like queries
    payload,  # [layer, 2, page, KV_HEADS, PAGE_TOKENS, HEAD_DIM]; FP8 also as int16 pairs, or UNPACKED
    scales,  # float32 [layer, 2, page, KV_HEADS, PAGE_TOKENS], of FP8
    query_starts,
    context_lengths,
    num_sequences,
    least_pages,
    most_pages,
    pages_begin,
    pages_window,
    block_tables,
    table_rows,
    table_stride,
    partial_sums,  # float32 [partial rows, HEADS, HEAD_DIM]; a sequence has rows * pieces of them
    partial_stats,  # float32 [partial rows, HEADS, 2]: running maximum, denominator
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
    UNPACKED: tl.constexpr,  # FP8 as `unpack_pages` has left it: pages in the order of sequences, without a table
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
    PAIRS: tl.constexpr = payload.dtype.element_ty == tl.int16
    WIDTH: tl.constexpr = HALF if PAIRS else HEAD_DIM  # elements of `payload` in a row
    BY_COLUMN: tl.constexpr = BLOCK_ROWS < 64  # denominators: sums over a row would cross the warps of small tiles
    PAGE_ROWS: tl.constexpr = KV_HEADS * PAGE_TOKENS
    PRECISION: tl.constexpr = "tf32" if PRODUCT.primitive_bitwidth < 32 else "ieee"

    # What there is to do, for all sequences at once.
    sequences, all_rows, all_contexts, first_pages = wanted_sequences(
        query_starts, context_lengths, num_sequences, least_pages, most_pages, pages_begin, pages_window,
        PAGE_TOKENS, UNPACKED, MAX_SEQUENCES, MIN_QUERY_ROWS, MAX_QUERY_ROWS,
    )  # fmt: skip
    all_pieces, partials_begin, here = partials(
        all_rows, all_contexts, window_begin, window_rows, PIECE_TOKENS, MAX_PIECES, PARTIAL_ROWS, BLOCK_TOKENS
    )
    all_items = tl.where(here, tl.cdiv(all_rows, TILE_TOKENS) * all_pieces * KV_HEADS, 0)
    items_end = tl.cumsum(all_items)
    num_items = tl.sum(all_items)

    k_first_row = (layer * 2).to(tl.int64) * num_pages * PAGE_ROWS
    v_first_row = k_first_row + num_pages.to(tl.int64) * PAGE_ROWS
    tile_rows = tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    stored_dims = tl.arange(0, WIDTH)
    block = tl.arange(0, BLOCK_TOKENS)
    block_offsets = block[:, None] * WIDTH + stored_dims[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()

    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=1):
        # Which item this is: sequence, query tile, piece, KV head.
        sequence, item_in_sequence = find(items_end, item)
        start = tl.load(query_starts + sequence)
        rows = tl.load(query_starts + sequence + 1) - start
        context = tl.load(context_lengths + sequence)
        if UNPACKED:
            first_page = value_of(first_pages, sequences, sequence)
        else:
            table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        piece_tokens = cut(context, rows, PIECE_TOKENS, MAX_PIECES, PARTIAL_ROWS, BLOCK_TOKENS)
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
        q = q.to(PRODUCT)
        if PAIRS:
            even_q, odd_q = _halves(q)

        top = tl.full([BLOCK_ROWS], NO_LOGIT, tl.float32)
        denominators = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS if BY_COLUMN else 1], tl.float32)
        sums = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
        odd_sums = sums
        if not UNPACKED:
            next_page = tl.load(table + begin // PAGE_TOKENS)
        for position in tl.range(begin, end, BLOCK_TOKENS, num_stages=STAGES):
            columns = position + block
            stored = columns < context
            if BLOCK_TOKENS <= PAGE_TOKENS:
                if UNPACKED:
                    page = first_page + position // PAGE_TOKENS
                else:
                    page = next_page
                    next_page = tl.load(table + tl.minimum(position + BLOCK_TOKENS, end - 1) // PAGE_TOKENS)
                first_row = (page * KV_HEADS + kv_head).to(tl.int64) * PAGE_TOKENS + position % PAGE_TOKENS
                k_block = payload + (k_first_row + first_row) * WIDTH + block_offsets
                v_block = payload + (v_first_row + first_row) * WIDTH + block_offsets
                k_scales = scales + (k_first_row + first_row) + block
                v_scales = scales + (v_first_row + first_row) + block
            else:
                if UNPACKED:
                    pages = tl.where(stored, first_page + columns // PAGE_TOKENS, 0)
                else:
                    pages = tl.load(table + columns // PAGE_TOKENS, mask=stored, other=0)
                kv_rows = (pages * KV_HEADS + kv_head).to(tl.int64) * PAGE_TOKENS + columns % PAGE_TOKENS
                k_block = payload + (k_first_row + kv_rows)[:, None] * WIDTH + stored_dims[None, :]
                v_block = payload + (v_first_row + kv_rows)[:, None] * WIDTH + stored_dims[None, :]
                k_scales = scales + k_first_row + kv_rows
                v_scales = scales + v_first_row + kv_rows

            if PAIRS:
                even_k, odd_k = unpack_pairs(tl.load(k_block, mask=stored[:, None], other=0), NATIVE)
                logits = tl.dot(even_q, even_k.T)
                logits = tl.dot(odd_q, odd_k.T, logits)
            else:
                k = tl.load(k_block, mask=stored[:, None], other=0.0).to(PRODUCT)
                v = tl.load(v_block, mask=stored[:, None], other=0.0).to(PRODUCT)
                logits = tl.dot(q, k.T, input_precision=PRECISION)
            logits *= row_scale[:, None]
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
            shares = weights * v_weight[None, :] if FP8 else weights
            if BY_COLUMN:
                denominators = denominators * fade + shares
            else:
                denominators = denominators * fade + tl.sum(shares, 1, keep_dims=True)
            weights = weights.to(PRODUCT)
            if PAIRS:
                even_v, odd_v = unpack_pairs(tl.load(v_block, mask=stored[:, None], other=0), NATIVE)
                sums = tl.dot(weights, even_v, sums * fade)
                odd_sums = tl.dot(weights, odd_v, odd_sums * fade)
            else:
                sums = tl.dot(weights, v, sums * fade, input_precision=PRECISION)

        if PAIRS:
            sums = tl.reshape(tl.join(sums, odd_sums), [BLOCK_ROWS, HEAD_DIM])
        denominator = tl.sum(denominators, 1)
        if num_pieces == 1:
            result = (sums / denominator[:, None]).to(out.dtype.element_ty)
            tl.store(out + row_heads[:, None] * HEAD_DIM + dims[None, :], result, mask=exists)
        else:
            first_partial = value_of(partials_begin, sequences, sequence) + piece * rows
            part_rows = ((first_partial + tokens) * HEADS + kv_head * GROUP + tile_rows % GROUP).to(tl.int64)
            tl.store(partial_sums + part_rows[:, None] * HEAD_DIM + dims[None, :], sums, mask=exists)
            tl.store(partial_stats + part_rows * 2, top, mask=tokens < rows)
            tl.store(partial_stats + part_rows * 2 + 1, denominator, mask=tokens < rows)
