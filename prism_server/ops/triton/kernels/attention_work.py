"""What programs of paged attention share: which sequences a launch takes, and how their contexts are cut."""
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

NO_LOGIT = tl.constexpr(-1.0e30)
"""Where a running maximum starts: below any logit, and finite, so that no difference of two is NaN."""


@triton.jit
def cut(
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


@triton.jit
def wanted_sequences(
    query_starts,
    context_lengths,
    num_sequences,
    least_pages,
    most_pages,
    pages_begin,  # of UNPACKED pages, a launch takes the sequences whose pages begin in the window,
    pages_window,  # and keeps them from the begin of their room
    PAGE_TOKENS: tl.constexpr,
    UNPACKED: tl.constexpr,
    MAX_SEQUENCES: tl.constexpr,
    MIN_QUERY_ROWS: tl.constexpr,
    MAX_QUERY_ROWS: tl.constexpr,
):
    """Of every sequence: its number, query rows (0 unless the launch takes it), context, first UNPACKED page."""
    sequences = tl.arange(0, MAX_SEQUENCES)
    there = sequences < num_sequences
    starts = tl.load(query_starts + sequences, mask=there, other=0)
    rows = tl.load(query_starts + sequences + 1, mask=there, other=0) - starts
    contexts = tl.load(context_lengths + sequences, mask=there, other=0)
    pages = tl.cdiv(contexts, PAGE_TOKENS)
    wanted = (rows >= MIN_QUERY_ROWS) & (rows <= MAX_QUERY_ROWS) & (pages >= least_pages) & (pages <= most_pages)
    pages = tl.where(wanted, pages, 0)
    begins = tl.cumsum(pages) - pages - pages_begin
    if UNPACKED:
        wanted = wanted & (begins >= 0) & (begins < pages_window)
    return sequences, tl.where(wanted, rows, 0), contexts, begins


@triton.jit
def partials(
    rows,
    contexts,
    window_begin,
    window_rows,
    PIECE_TOKENS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Of every sequence: its pieces, where its partial rows begin in the workspace, and whether this window has it."""
    pieces = tl.cdiv(contexts, cut(contexts, rows, PIECE_TOKENS, MAX_PIECES, PARTIAL_ROWS, BLOCK_TOKENS))
    counts = tl.where(pieces > 1, rows * pieces, 0)
    begins = tl.cumsum(counts) - counts - window_begin
    return pieces, begins, (rows > 0) & (begins >= 0) & (begins < window_rows)


@triton.jit
def find(items_end, item):
    """Which sequence an item belongs to, and which of its items it is."""
    before = items_end <= item
    return tl.sum(before.to(tl.int32)), item - tl.max(tl.where(before, items_end, 0))


@triton.jit
def value_of(values, sequences, sequence):
    return tl.sum(tl.where(sequences == sequence, values, 0))


@triton.jit
def unpack_pairs(pairs, NATIVE: tl.constexpr):
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
