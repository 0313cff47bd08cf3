"""Moving rows and pages of the pool: whole words, whatever they mean.

Payload [plane, page, kv_head, slot, head_dim] and scales [plane, page, kv_head, slot], a plane being a layer's K or V;
both are seen as int32 words. A row is ROW_WORDS of payload and, with SCALES, one word of scales.
"""
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit
def _copy_words(source, target, count, BLOCK: tl.constexpr):
    words = tl.arange(0, BLOCK)
    tl.store(target + words, tl.load(source + words, mask=words < count), mask=words < count)


@triton.jit
def copy_rows(
    payload,
    scales,
    copies,
    num_pages,
    KV_HEADS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
):
    """Rows [0, rows) of page `source` to page `target`, for each (source, target, rows) of copies int32 [n, 3].

    BLOCK >= PAGE_TOKENS * ROW_WORDS, SCALE_BLOCK >= PAGE_TOKENS. Grid (n, planes * KV_HEADS).
    """
    copy = copies + tl.program_id(0) * 3
    source = tl.load(copy).to(tl.int64)
    target = tl.load(copy + 1).to(tl.int64)
    rows = tl.load(copy + 2)
    plane = (tl.program_id(1) // KV_HEADS).to(tl.int64) * num_pages
    head = tl.program_id(1) % KV_HEADS
    source_row = ((plane + source) * KV_HEADS + head) * PAGE_TOKENS
    target_row = ((plane + target) * KV_HEADS + head) * PAGE_TOKENS
    _copy_words(payload + source_row * ROW_WORDS, payload + target_row * ROW_WORDS, rows * ROW_WORDS, BLOCK)
    if SCALES:
        _copy_words(scales + source_row, scales + target_row, rows, SCALE_BLOCK)


@triton.jit
def move_pages(
    pool,
    staging,
    pages,
    num_pages,
    page_words,
    staging_stride,
    TO_POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Page pages[i] (int32 [n]) of pool [planes, num_pages, page_words] to or from row i of the staging area.

    Such a row, staging_stride words from the next, has the planes one after the other. Grid (n, planes).
    """
    place = tl.program_id(0)
    plane = tl.program_id(1).to(tl.int64)
    page = tl.load(pages + place).to(tl.int64)
    in_pool = pool + (plane * num_pages + page) * page_words
    in_staging = staging + place.to(tl.int64) * staging_stride + plane * page_words
    for start in range(0, page_words, BLOCK):
        if TO_POOL:
            _copy_words(in_staging + start, in_pool + start, page_words - start, BLOCK)
        else:
            _copy_words(in_pool + start, in_staging + start, page_words - start, BLOCK)
