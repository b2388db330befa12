"""The Triton kernels of paged.py, which says what they compute. Internal: imports Triton, which GPUs have."""

# Triton reads these functions' source, and knows their arguments by position: annotations say nothing to it.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
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
    k_slot,
    k_head,
    v_slot,
    v_head,
    table_row,
    scale,
    cap,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    QUERIES: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """One row, one key/value head, one split of the row's slots: `QUERIES` of the head's TOKENS * GROUP queries."""
    row, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    query = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    token, q_of_group = query // GROUP, query % GROUP
    there = query < TOKENS * GROUP
    first_slot = tl.load(first + row * TOKENS + token, mask=there, other=2147483647)
    end_slot = tl.load(ends + row * TOKENS + token, mask=there, other=0)
    key_lanes, value_lanes = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    q_head_of = (head * GROUP + q_of_group).to(tl.int64)
    queries = tl.load(
        q + row.to(tl.int64) * q_row + (q_head_of * q_head + token * q_token)[:, None] + key_lanes[None, :],
        mask=there[:, None],
        other=0.0,
    )
    if IN_FP32:
        queries = queries.to(tl.float32)

    # The slots that any of these queries sees, in equal parts of whole steps.
    begin, end = tl.min(first_slot, axis=0), tl.max(end_slot, axis=0)
    begin = begin // SLOTS * SLOTS
    steps = tl.cdiv(tl.maximum(end - begin, 0), SLOTS)
    part = tl.cdiv(steps, SPLITS) * SLOTS
    begin += split * part
    end = tl.minimum(end, begin + part)

    peak = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, VALUE_WIDTH], tl.float32)
    for start in range(begin, end, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        inside = slot < end
        block = tl.load(table + row.to(tl.int64) * table_row + slot // BLOCK, mask=inside, other=0)
        place = block.to(tl.int64) * BLOCK + slot % BLOCK
        k = tl.load(
            keys + (place * k_slot + head * k_head)[:, None] + key_lanes[None, :], mask=inside[:, None], other=0.0
        )
        v = tl.load(
            values + (place * v_slot + head * v_head)[:, None] + value_lanes[None, :], mask=inside[:, None], other=0.0
        )
        if IN_FP32:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [QUERIES, SLOTS]
        if HAS_CAP:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # tanh
        seen = inside[None, :] & (slot[None, :] >= first_slot[:, None]) & (slot[None, :] < end_slot[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)  # -inf less itself would be NaN
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = new_peak

    divisor = tl.where(total == 0.0, 1.0, total)
    # out [rows, query heads, TOKENS, SPLITS, VALUE_WIDTH], lse [rows, query heads, TOKENS, SPLITS]
    place = ((row.to(tl.int64) * KV_HEADS * GROUP + q_head_of) * TOKENS + token) * SPLITS + split
    tl.store(
        out + place[:, None] * VALUE_WIDTH + value_lanes[None, :],
        (sums / divisor[:, None]).to(out.dtype.element_ty),
        mask=there[:, None],
    )
    tl.store(lse + place, tl.where(total == 0.0, -float("inf"), peak + tl.log(divisor)), mask=there)


@triton.jit
def merge_splits(out, lse, merged, merged_lse, VALUE_WIDTH: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr):
    """One query's splits put together. LANES: SPLITS, up to a power of two."""
    query = tl.program_id(0).to(tl.int64)
    splits, value_lanes = tl.arange(0, LANES), tl.arange(0, VALUE_WIDTH)
    there = splits < SPLITS
    each = tl.load(lse + query * SPLITS + splits, mask=there, other=-float("inf"))
    peak = tl.max(each, axis=0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weights = tl.exp(each - base)
    total = tl.sum(weights, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    parts = tl.load(
        out + (query * SPLITS + splits)[:, None] * VALUE_WIDTH + value_lanes[None, :], mask=there[:, None], other=0.0
    )
    value = tl.sum(parts * weights[:, None], axis=0) / divisor
    tl.store(merged + query * VALUE_WIDTH + value_lanes, value.to(merged.dtype.element_ty))
    tl.store(merged_lse + query, tl.where(total == 0.0, -float("inf"), base + tl.log(divisor)))
