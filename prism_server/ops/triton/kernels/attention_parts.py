"""What comes before and after paged attention: FP8 pages as half-precision ones, and pieces of a context as one."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from prism_server.ops.triton.kernels.attention_work import (
    NO_LOGIT,
    find,
    partials,
    value_of,
    wanted_sequences,
)


@triton.jit(
    do_not_specialize=[
        "num_sequences",
        "least_pages",
        "most_pages",
        "pages_begin",
        "pages_window",
        "window_begin",
        "window_rows",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lengths"],
)
def add_pieces(
    out,  # [rows, HEADS, HEAD_DIM]
    partial_sums,  # as `paged_attention` has left them
    partial_stats,
    query_starts,
    context_lengths,
    num_sequences,
    least_pages,
    most_pages,
    pages_begin,
    pages_window,
    window_begin,
    window_rows,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    UNPACKED: tl.constexpr,
    MAX_SEQUENCES: tl.constexpr,
    MIN_QUERY_ROWS: tl.constexpr,
    MAX_QUERY_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PIECE_TOKENS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows of cut contexts: a program adds the pieces of one row and BLOCK_HEADS heads, always in one order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sequences, all_rows, contexts, _ = wanted_sequences(
        query_starts, context_lengths, num_sequences, least_pages, most_pages, pages_begin, pages_window,
        PAGE_TOKENS, UNPACKED, MAX_SEQUENCES, MIN_QUERY_ROWS, MAX_QUERY_ROWS,
    )  # fmt: skip
    all_pieces, begins, here = partials(
        all_rows, contexts, window_begin, window_rows, PIECE_TOKENS, MAX_PIECES, PARTIAL_ROWS, BLOCK_TOKENS
    )
    items = tl.where(here & (all_pieces > 1), all_rows * (HEADS // BLOCK_HEADS), 0)
    items_end = tl.cumsum(items)
    dims = tl.arange(0, HEAD_DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for item in tl.range(tl.program_id(0), tl.sum(items), tl.num_programs(0), num_stages=1):
        sequence, item_in_sequence = find(items_end, item)
        rows = value_of(all_rows, sequences, sequence)
        num_pieces = value_of(all_pieces, sequences, sequence)
        row = item_in_sequence // (HEADS // BLOCK_HEADS)
        first_row = value_of(begins, sequences, sequence) + row
        heads = item_in_sequence % (HEADS // BLOCK_HEADS) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        top = tl.full([BLOCK_HEADS], NO_LOGIT, tl.float32)
        denominator = tl.zeros([BLOCK_HEADS], tl.float32)
        total = tl.zeros([BLOCK_HEADS, HEAD_DIM], tl.float32)
        for first in tl.range(0, num_pieces, BLOCK_PIECES, num_stages=1):
            pieces = first + tl.arange(0, BLOCK_PIECES)
            there = (pieces < num_pieces)[:, None] & (heads >= 0)[None, :]
            parts = ((first_row + pieces * rows)[:, None] * HEADS + heads[None, :]).to(tl.int64)
            part_tops = tl.load(partial_stats + parts * 2, mask=there, other=NO_LOGIT)
            part_denominators = tl.load(partial_stats + parts * 2 + 1, mask=there, other=0.0)
            sums = tl.load(
                partial_sums + parts[:, :, None] * HEAD_DIM + dims[None, None, :], mask=there[:, :, None], other=0.0
            )
            new_top = tl.maximum(top, tl.max(part_tops, 0))
            fade = tl.exp2(top - new_top)
            shares = tl.exp2(part_tops - new_top[None, :])
            top = new_top
            denominator = denominator * fade + tl.sum(part_denominators * shares, 0)
            total = total * fade[:, None] + tl.sum(sums * shares[:, :, None], 0)
        out_rows = ((tl.load(query_starts + sequence) + row) * HEADS + heads).to(tl.int64)
        result = (total / denominator[:, None]).to(out.dtype.element_ty)
        tl.store(out + out_rows[:, None] * HEAD_DIM + dims[None, :], result)


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
        "unpacked_pages",
    ],
    do_not_specialize_on_alignment=["query_starts", "context_lengths", "block_tables", "table_rows"],
)
def unpack_pages(
    payload,  # float8e4nv [layer, 2, page, KV_HEADS, PAGE_TOKENS, HEAD_DIM]
    scales,  # float32 [layer, 2, page, KV_HEADS, PAGE_TOKENS]
    unpacked,  # float16 [2, unpacked page, KV_HEADS, PAGE_TOKENS, HEAD_DIM]
    unpacked_scales,  # float32 [2, unpacked page, KV_HEADS, PAGE_TOKENS]
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
    layer,
    num_pages,
    unpacked_pages,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    UNPACKED: tl.constexpr,
    MAX_SEQUENCES: tl.constexpr,
    MIN_QUERY_ROWS: tl.constexpr,
    MAX_QUERY_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The pages of the sequences that a launch takes, one sequence's after the other's: each is converted once."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _, rows, contexts, begins = wanted_sequences(
        query_starts, context_lengths, num_sequences, least_pages, most_pages, pages_begin, pages_window,
        PAGE_TOKENS, UNPACKED, MAX_SEQUENCES, MIN_QUERY_ROWS, MAX_QUERY_ROWS,
    )  # fmt: skip
    first_page = tl.min(tl.where(rows > 0, begins, 1 << 30))
    pages_end = tl.cumsum(tl.where(rows > 0, tl.cdiv(contexts, PAGE_TOKENS), 0))
    slots = tl.arange(0, PAGE_TOKENS)
    dims = tl.arange(0, HEAD_DIM)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for item in tl.range(tl.program_id(0), tl.max(pages_end) * (2 * KV_HEADS), tl.num_programs(0), num_stages=1):
        page = item // (2 * KV_HEADS)
        kv_head = item % KV_HEADS
        side = item // KV_HEADS % 2  # K, V
        sequence, page_in_sequence = find(pages_end, page)
        table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
        from_page = (layer * 2 + side).to(tl.int64) * num_pages + tl.load(table + page_in_sequence)
        to_page = side.to(tl.int64) * unpacked_pages + first_page + page
        from_rows = (from_page * KV_HEADS + kv_head) * PAGE_TOKENS + slots
        to_rows = (to_page * KV_HEADS + kv_head) * PAGE_TOKENS + slots
        rows_of_page = tl.load(payload + from_rows[:, None] * HEAD_DIM + dims[None, :])
        row_scales = tl.load(scales + from_rows)
        tl.store(unpacked + to_rows[:, None] * HEAD_DIM + dims[None, :], rows_of_page.to(tl.float16))
        tl.store(unpacked_scales + to_rows, row_scales)
