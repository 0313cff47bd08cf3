"""Choosing tokens from float32 logits: the best one, or one at random among the best, without sorting the vocabulary.

A token's place is an int64: its logit, as an integer of the same order, above the complement of its id in 20 bits.
Places are distinct, and falling places are the order of draws: falling logits, of equals the lower id first. Whatever
is looked for - the k-th token, where the nucleus ends, where the random number falls - is the place before which there
is just so much, counted or weighed. It is found by thresholds: a coarse net of them first, over parts of the row by
programs of their own; then finer ones between two of these, over the row while many tokens lie there, and over a list
of these tokens as soon as it is short.
"""
# ruff: noqa: N803

import triton
import triton.language as tl
from triton.language.extra import cuda

LOWEST_PLACE = tl.constexpr(-(2**63))
ID_BITS = tl.constexpr(20)
LAST_ID = tl.constexpr((1 << 20) - 1)
HIGHEST_PLACE = tl.constexpr(2**63 - 1)
LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_TEMPERATURE = tl.constexpr(1e-37)
"""Below some 4e-39, log2(e) / temperature is no float32; the best tokens have all the weight long before that."""
NEGLIGIBLE = tl.constexpr(41.6)
"""exp(-41.6) = 2^-60: all tokens of the vocabulary together weigh nothing that far below the best one."""
FIXED_POINT = tl.constexpr(2.0**44)
"""One, in the int64 sums of weights of a list: they do not depend on its order."""


@triton.jit
def _logit_key(logits):
    """float32 -> int32 of the same order; -0.0 is 0.0, NaN above all."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _place(logits, ids):
    return (_logit_key(logits).to(tl.int64) << ID_BITS) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def _logit_of(places):
    key = (places >> ID_BITS).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(places):
    return (places & LAST_ID) ^ LAST_ID


@triton.jit
def _weight(logits, best, rate):
    """exp((logit - best) / temperature), rate being log2(e) / temperature; 0 of -inf."""
    return tl.exp2((logits - best) * rate)


@triton.jit
def extremes(logits, parts, vocab_size, num_parts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """parts int64 [rows, num_parts, 2]: the first place of a block, and the last one of a logit that is not -inf.

    logits float32 [rows, vocab_size]. Grid (rows, num_parts), num_parts * BLOCK >= vocab_size.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    values = tl.load(logits + row * vocab_size + ids, mask=inside, other=0.0)
    places = _place(values, ids)
    part = parts + (row * num_parts + tl.program_id(1)) * 2
    tl.store(part, tl.max(tl.where(inside, places, LOWEST_PLACE)))
    tl.store(part + 1, tl.min(tl.where(inside & (values != float("-inf")), places, HIGHEST_PLACE)))


@triton.jit
def best_ids(parts, out, num_parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out int64 [rows]: id of the first place of a row. Grid (rows,), BLOCK >= num_parts.

    parts int64 [rows, num_parts, WIDTH], of which the first column counts.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.arange(0, BLOCK)
    found = tl.load(parts + (row * num_parts + numbers) * WIDTH, mask=numbers < num_parts, other=LOWEST_PLACE)
    tl.store(out + row, _id_of(tl.max(found)))


@triton.jit
def _sums_of_row(logits, start, end, vocab_size, best, rate, thresholds, BLOCK: tl.constexpr):
    """Of tokens `start` to `end` of a row: weights float32 and number int32 of those above each threshold [W]."""
    weights = tl.zeros([BLOCK, thresholds.shape[0]], tl.float32)
    counts = tl.zeros([BLOCK, thresholds.shape[0]], tl.int32)
    for first in range(start, end, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        inside = (ids < end) & (ids < vocab_size)
        values = tl.load(logits + ids, mask=inside, other=float("-inf"))
        places = tl.where(inside, _place(values, ids), LOWEST_PLACE)
        above = places[:, None] > thresholds[None, :]
        weights += tl.where(above, _weight(values, best, rate)[:, None], 0.0)
        counts += above.to(tl.int32)
    return tl.sum(weights, axis=0), tl.sum(counts, axis=0)


@triton.jit
def _load_row(parts, choices, row, num_parts, PARTS: tl.constexpr):
    """Of a row: its first place, the last one that is not of -inf, best logit, log2(e) / temperature, temperature."""
    numbers = tl.arange(0, PARTS)
    part = parts + (row * num_parts + numbers) * 2
    first = tl.max(tl.load(part, mask=numbers < num_parts, other=LOWEST_PLACE))
    last = tl.min(tl.load(part + 1, mask=numbers < num_parts, other=HIGHEST_PLACE))
    temperature = tl.maximum(tl.load(choices + row * 5), LEAST_TEMPERATURE)
    best = tl.maximum(_logit_of(first), -3.0e38)
    return first, tl.minimum(first, last), best, (1.0 / temperature * LOG2_E).to(tl.float32), temperature


@triton.jit(do_not_specialize=["choices"])
def coarse_sums(
    logits,
    choices,
    parts,
    thresholds,
    weights,
    counts,
    vocab_size,
    num_parts,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Thresholds int64 [rows, WIDTH] and, of each chunk, weights float32 and counts int32 [rows, num_parts, WIDTH].

    Thresholds divide the logits between the best and the last of any weight evenly; the last one is below all of
    these, the last but one is where min-p ends. Grid (rows, num_parts); parts as `extremes` left them.
    """
    row = tl.program_id(0).to(tl.int64)
    _, last, best, rate, temperature = _load_row(parts, choices, row, num_parts, PARTS)
    lowest = tl.maximum((best - temperature * NEGLIGIBLE).to(tl.float32), _logit_of(last))
    lane = tl.arange(0, WIDTH)
    values = best - (best - lowest) * ((lane + 1).to(tl.float32) / (WIDTH - 1))
    values = tl.where(lane >= WIDTH - 2, lowest, tl.maximum(values, lowest))
    # Kept by min-p: logits of at least this, rounded up to float32.
    least = best + temperature * tl.log(tl.load(choices + row * 5 + 3))
    rounded = least.to(tl.float32)
    least_key = _logit_key(rounded) + (rounded.to(tl.float64) < least).to(tl.int32)
    keys = tl.where(lane == WIDTH - 2, least_key, _logit_key(values))
    places = (keys.to(tl.int64) << ID_BITS) - 1
    start = tl.program_id(1) * CHUNK
    weight, count = _sums_of_row(logits + row * vocab_size, start, start + CHUNK, vocab_size, best, rate, places, BLOCK)
    place = (row * num_parts + tl.program_id(1)) * WIDTH + lane
    tl.store(weights + place, weight)
    tl.store(counts + place, count)
    if tl.program_id(1) == 0:
        tl.store(thresholds + row * WIDTH + lane, places)


@triton.jit
def _narrow(low, high, weight_above, count_above, count_low, thresholds, weights, counts, target, BY_COUNT):
    """The bracket [low, high] of the place that is looked for, cut by the sums above some thresholds.

    What is looked for is the lowest place above which there is no more than `target`. Above `high` there are
    weight_above and count_above, at `low` and above count_low.
    """
    holds = tl.where(BY_COUNT, counts.to(tl.float64), weights) <= target
    inside = (thresholds >= low) & (thresholds <= high)
    # Sums of the same places taken twice may differ in their last bits. Counts do not: they keep a place in the bracket
    # and shrink it with every threshold below `high`.
    lower = inside & (counts < count_low) & (holds | (counts == count_above))
    upper = inside & (counts > count_above) & ((holds == 0) | (counts == count_low))
    high = tl.minimum(high, tl.min(tl.where(lower, thresholds, HIGHEST_PLACE)))
    low = tl.maximum(low, tl.max(tl.where(upper, thresholds + 1, LOWEST_PLACE)))
    weight_above = tl.maximum(weight_above, tl.max(tl.where(lower, weights, 0.0)))
    count_above = tl.maximum(count_above, tl.max(tl.where(lower, counts, 0)))
    count_low = tl.minimum(count_low, tl.min(tl.where(upper, counts, 0x7FFFFFFF)))
    return low, high, weight_above, count_above, count_low


@triton.jit
def _evenly(low, high, LOG2_WIDTH: tl.constexpr):
    """2^LOG2_WIDTH thresholds from `low` to `high`."""
    lane = tl.arange(0, 1 << LOG2_WIDTH)
    return tl.where(lane == (1 << LOG2_WIDTH) - 1, high, low + ((high - low) >> LOG2_WIDTH) * lane)


@triton.jit
def _collect(logits, found, counter, low, high, vocab_size, BLOCK: tl.constexpr, FOUND: tl.constexpr):
    """Write the places of a row between `low` and `high` to `found`, in any order, at most FOUND of them."""
    tl.store(counter, 0)
    tl.debug_barrier()
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
        places = _place(values, ids)
        wanted = (ids < vocab_size) & (places >= low) & (places <= high)
        index = tl.atomic_add(counter + tl.zeros_like(ids), 1, mask=wanted, sem="relaxed")
        tl.store(found + index, places, mask=wanted & (index < FOUND))
    tl.debug_barrier()


@triton.jit(do_not_specialize=["choices"])
def draw_ids(
    logits,
    choices,
    parts,
    thresholds,
    weights,
    counts,
    found,
    counters,
    out,
    vocab_size,
    num_parts,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
    COLLECT_BLOCK: tl.constexpr,
):
    """out int64 [rows]: a token each, as `Ops.draw` says. Grid (rows,); the sums as `coarse_sums` left them.

    found int64 [rows, FOUND] and counters int32 [rows] are room to work in.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab_size
    first, last, best, rate, _ = _load_row(parts, choices, row, num_parts, PARTS)
    lane = tl.arange(0, WIDTH)
    coarse = tl.load(thresholds + row * WIDTH + lane)
    part = tl.arange(0, PARTS)[:, None]
    sums = (row * num_parts + part) * WIDTH + lane[None, :]
    inside = (part < num_parts) & (lane[None, :] < WIDTH)
    coarse_weights = tl.sum(tl.load(weights + sums, mask=inside, other=0.0).to(tl.float64), axis=0)
    coarse_counts = tl.sum(tl.load(counts + sums, mask=inside, other=0), axis=0)

    top_k = tl.load(choices + row * 5 + 1)
    top_p = tl.load(choices + row * 5 + 2)
    number = tl.load(choices + row * 5 + 4)
    # What is left so far: places from `end` on, their weight and number.
    end = tl.maximum(tl.max(tl.where(lane == WIDTH - 1, coarse, LOWEST_PLACE)) + 1, last)
    total = tl.max(tl.where(lane == WIDTH - 1, coarse_weights, 0.0))
    left = tl.max(tl.where(lane == WIDTH - 1, coarse_counts, 0))
    min_p_end = tl.max(tl.where(lane == WIDTH - 2, coarse, LOWEST_PLACE)) + 1
    min_p_weight = tl.max(tl.where(lane == WIDTH - 2, coarse_weights, 0.0))
    min_p_left = tl.max(tl.where(lane == WIDTH - 2, coarse_counts, 0))
    for search in range(3):  # top-k, top-p, the number
        if (search == 2) & (min_p_end > end):
            end = min_p_end
            total = min_p_weight
            left = min_p_left
        # Top-p keeps a token if the weight before it is less than this: no more than the number just below.
        nucleus = ((top_p * total).to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
        target = tl.where(search == 0, top_k - 1.0, tl.where(search == 1, nucleus, number * total))
        needed = tl.where(search == 0, top_k < left, tl.where(search == 1, top_p < 1.0, True))
        if needed & (left > 0):
            end, total, left = _find(
                logits,
                found + row * FOUND,
                counters + row,
                end,
                first,
                left,
                coarse,
                coarse_weights,
                coarse_counts,
                target,
                search == 0,
                vocab_size,
                best,
                rate,
                FOUND,
                BLOCK,
                COLLECT_BLOCK,
            )
    tl.store(out + row, _id_of(tl.where(left > 0, end, first)))


@triton.jit
def _find(
    logits,
    found,
    counter,
    low,
    high,
    count_low,
    thresholds,
    weights,
    counts,
    target,
    BY_COUNT,
    vocab_size,
    best,
    rate,
    FOUND: tl.constexpr,
    BLOCK: tl.constexpr,
    COLLECT_BLOCK: tl.constexpr,
):
    """The lowest place above which there is no more than `target`, and weight and number of the places from it on.

    It is one of the count_low places from `low` to `high`, the first of the row; sums above `thresholds` are known.
    """
    weight_above = tl.full([], 0.0, tl.float64)
    count_above = tl.full([], 0, tl.int32)
    low, high, weight_above, count_above, count_low = _narrow(
        low, high, weight_above, count_above, count_low, thresholds, weights, counts, target, BY_COUNT
    )
    while (count_low - count_above > FOUND) & (low < high):
        cuts = _evenly(low, high, 3)
        row_weights, row_counts = _sums_of_row(logits, 0, vocab_size, vocab_size, best, rate, cuts, BLOCK)
        low, high, weight_above, count_above, count_low = _narrow(
            low,
            high,
            weight_above,
            count_above,
            count_low,
            cuts,
            row_weights.to(tl.float64),
            row_counts,
            target,
            BY_COUNT,
        )
    _collect(logits, found, counter, low, high, vocab_size, COLLECT_BLOCK, FOUND)
    number = tl.arange(0, FOUND)
    listed = tl.load(found + number, mask=number < count_low - count_above, other=LOWEST_PLACE)
    fixed = (_weight(_logit_of(listed), best, rate) * FIXED_POINT).to(tl.int64)
    fixed = tl.where(listed != LOWEST_PLACE, fixed, 0)
    low = tl.maximum(low, tl.min(tl.where(listed != LOWEST_PLACE, listed, HIGHEST_PLACE)))
    high = tl.minimum(high, tl.max(listed))
    weight_before = weight_above  # of what is not in the list
    count_before = count_above
    while (count_low - count_above > 1) & (low < high):
        cuts = _evenly(low, high, 2)
        above = listed[:, None] > cuts[None, :]
        list_weights = tl.sum(tl.where(above, fixed[:, None], 0), axis=0).to(tl.float64) / FIXED_POINT
        list_counts = tl.sum(above.to(tl.int32), axis=0)
        low, high, weight_above, count_above, count_low = _narrow(
            low,
            high,
            weight_above,
            count_above,
            count_low,
            cuts,
            list_weights + weight_before,
            list_counts + count_before,
            target,
            BY_COUNT,
        )
    place = tl.max(tl.where((listed >= low) & (listed <= high), listed, LOWEST_PLACE))
    weight = _weight(_logit_of(place), best, rate).to(tl.float64)
    return place, weight_above + weight, count_above + 1
