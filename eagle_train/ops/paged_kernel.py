"""The Triton kernels of paged.py, which says what they compute. Internal: imports Triton, which GPUs have.

Numbers that grow with a text are no constants, and are not looked at for divisors: each new kernel is compiled, while a
request waits.
"""

# Triton reads these functions' source, and knows their arguments by position: annotations say nothing to it.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_row", "tokens", "splits"])
def attend_split(
    q,
    keys,
    values,
    table,
    first,
    ends,
    out,
    lse,
    q_row,
    q_head,
    q_token,
    table_row,
    scale,
    cap,
    tokens,
    splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """One row, one key/value head, one split of the row's slots: QUERIES of the head's tokens * GROUP queries.

    out [rows, tokens, query heads, splits, VALUE_WIDTH], and lse without the last dimension. Of a query that sees none
    of a split's slots nothing is written but lse, which is -inf; where there is one split, zeros too.
    """
    row, kv_head, split = (tl.program_id(0) // KV_HEADS).to(tl.int64), tl.program_id(0) % KV_HEADS, tl.program_id(1)
    query = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    token, head = query // GROUP, (kv_head * GROUP + query % GROUP).to(tl.int64)
    there = query < tokens * GROUP
    q += (row * q_row + head * q_head + token * q_token)[:, None] + tl.arange(0, KEY_WIDTH)
    queries = tl.load(q, mask=there[:, None], other=0.0)
    first_slot = tl.load(first + row * tokens + token, mask=there, other=2147483647)
    end_slot = tl.load(ends + row * tokens + token, mask=there, other=0)
    begin, end = _part(first_slot, end_slot, split, splits, SLOTS)
    state = (
        tl.full([QUERIES], -float("inf"), tl.float32),
        tl.zeros([QUERIES], tl.float32),
        tl.zeros([QUERIES, VALUE_WIDTH], tl.float32),
    )
    for start in range(begin, end, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        inside = slot < end
        block = tl.load(table + row * table_row + slot // BLOCK, mask=inside, other=0).to(tl.int64)
        place = (block * BLOCK + slot % BLOCK) * KV_HEADS + kv_head
        scores = _scores(queries, keys, place, inside, scale, cap, KEY_WIDTH, HAS_CAP, IN_FP32)
        visible = inside[None, :] & (slot[None, :] >= first_slot[:, None]) & (slot[None, :] < end_slot[:, None])
        state = _add(state, scores, visible, values, place, inside, VALUE_WIDTH, IN_FP32)
    peak, total, sums = state
    divisor = tl.where(total == 0.0, 1.0, total)
    place = ((row * tokens + token) * KV_HEADS * GROUP + head) * splits + split
    out += place[:, None] * VALUE_WIDTH + tl.arange(0, VALUE_WIDTH)
    is_read = tl.where(splits == 1, there, there & (total != 0.0))
    tl.store(out, (sums / divisor[:, None]).to(out.dtype.element_ty), mask=is_read[:, None])
    tl.store(lse + place, tl.where(total == 0.0, -float("inf"), peak + tl.log(divisor)), mask=there)


@triton.jit
def _part(first_slot, end_slot, split, splits, SLOTS: tl.constexpr):
    """The slots of a split, of those that any of the queries sees: equal parts of whole steps."""
    begin, end = tl.min(first_slot, axis=0) // SLOTS * SLOTS, tl.max(end_slot, axis=0)
    part = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), SLOTS), splits) * SLOTS
    begin += split * part
    return begin, tl.minimum(end, begin + part)


@triton.jit
def _scores(
    queries,
    keys,
    place,
    inside,
    scale,
    cap,
    KEY_WIDTH: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """[QUERIES, SLOTS] of keys that lie at `place`."""
    k = tl.load(keys + place[:, None] * KEY_WIDTH + tl.arange(0, KEY_WIDTH), mask=inside[:, None], other=0.0)
    if IN_FP32:
        queries, k = queries.to(tl.float32), k.to(tl.float32)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # tanh
    return scores


@triton.jit
def _add(state, scores, visible, values, place, inside, VALUE_WIDTH: tl.constexpr, IN_FP32: tl.constexpr):
    """The running softmax with further slots: each query's greatest score, sum of weights, and sums of values."""
    peak, total, sums = state
    v = tl.load(values + place[:, None] * VALUE_WIDTH + tl.arange(0, VALUE_WIDTH), mask=inside[:, None], other=0.0)
    if IN_FP32:
        v = v.to(tl.float32)
    scores = tl.where(visible, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf less itself would be NaN
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(peak - base)
    sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_peak, total * shrink + tl.sum(weights, axis=1), sums


@triton.jit(do_not_specialize=["splits"])
def merge_splits(out, lse, merged, merged_lse, splits, VALUE_WIDTH: tl.constexpr, LANES: tl.constexpr):
    """One query's splits put together, LANES at a time. Of those that have no slots `out` holds anything."""
    query = tl.program_id(0).to(tl.int64)
    value_lanes = tl.arange(0, VALUE_WIDTH)
    peak, total = tl.full([], -float("inf"), tl.float32), tl.full([], 0.0, tl.float32)
    sums = tl.zeros([VALUE_WIDTH], tl.float32)
    for start in range(0, splits, LANES):
        split = start + tl.arange(0, LANES)
        each = tl.load(lse + query * splits + split, mask=split < splits, other=-float("inf"))
        part = out + (query * splits + split)[:, None] * VALUE_WIDTH + value_lanes[None, :]
        values = tl.load(part, mask=(each != -float("inf"))[:, None], other=0.0)
        new_peak = tl.maximum(peak, tl.max(each, axis=0))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf less itself would be NaN
        weights, shrink = tl.exp(each - base), tl.exp(peak - base)
        sums = sums * shrink + tl.sum(values * weights[:, None], axis=0)
        peak, total = new_peak, total * shrink + tl.sum(weights, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(merged + query * VALUE_WIDTH + value_lanes, (sums / divisor).to(merged.dtype.element_ty))
    tl.store(merged_lse + query, tl.where(total == 0.0, -float("inf"), peak + tl.log(divisor)))


@triton.jit
def write_slots(
    k,
    v,
    keys,
    values,
    slots,
    k_row,
    k_head,
    k_token,
    k_lane,
    v_row,
    v_head,
    v_token,
    v_lane,
    HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One token's key and value of all heads."""
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row * tl.num_programs(0) + token)
    key, value = k + row * k_row + token * k_token, v + row * v_row + token * v_token
    _copy(key, keys + slot * HEADS * KEY_WIDTH, k_head, k_lane, HEADS, KEY_WIDTH, LANES)
    _copy(value, values + slot * HEADS * VALUE_WIDTH, v_head, v_lane, HEADS, VALUE_WIDTH, LANES)


@triton.jit
def _copy(source, target, head, lane, HEADS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """[HEADS, WIDTH] by strides `head` and `lane` into one piece."""
    for start in range(0, HEADS * WIDTH, LANES):
        at = start + tl.arange(0, LANES)
        there = at < HEADS * WIDTH
        found = tl.load(source + (at // WIDTH).to(tl.int64) * head + at % WIDTH * lane, mask=there)
        tl.store(target + at, found.to(target.dtype.element_ty), mask=there)
