"""The Triton kernel of fused_loss.py, which says what it computes. Internal: imports Triton, which GPUs have."""

# Triton reads these functions' source, and knows their arguments by position: annotations say nothing to it.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

_LEAST = tl.constexpr(-3.0e38)  # in fp32; of lanes that have seen no logit yet: -inf less itself would be NaN


@triton.jit
def _logit(row, columns, inside, bias, scale, cap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """A block's logits [BLOCK] in fp32, -inf beyond the vocabulary's end."""
    x = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    x *= scale
    if HAS_CAP:
        x = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)  # tanh
    return tl.where(inside, x, -float("inf"))


@triton.jit
def _first(peaks, places, peak, end):
    """The first column of the greatest logit: among the lanes [BLOCK] that have it."""
    return tl.min(tl.where(peaks == peak, places, end), axis=0)


@triton.jit
def loss_of_row(
    of_target,
    of_draft,
    bias,
    sums,
    target_stride,
    draft_stride,
    scale,
    cap,
    VOCABULARY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_LK: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    LK_RATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target, draft = of_target + row * target_stride, of_draft + row * draft_stride
    lanes = tl.arange(0, BLOCK)

    # Of target and draft, by lane: the greatest logit, its column, the sum of exp(logit - greatest); and the sum of
    # the draft's logits, weighted as the target's sum is.
    t_peaks = tl.full([BLOCK], _LEAST, tl.float32)
    d_peaks = tl.full([BLOCK], _LEAST, tl.float32)
    t_places = tl.full([BLOCK], 0, tl.int32)
    d_places = tl.full([BLOCK], 0, tl.int32)
    t_sums = tl.zeros([BLOCK], tl.float32)
    d_sums = tl.zeros([BLOCK], tl.float32)
    dots = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + lanes
        inside = columns < VOCABULARY
        t = _logit(target, columns, inside, bias, scale, cap, HAS_BIAS, HAS_CAP)
        d = _logit(draft, columns, inside, bias, scale, cap, HAS_BIAS, HAS_CAP)
        t_places = tl.where(t > t_peaks, columns, t_places)
        d_places = tl.where(d > d_peaks, columns, d_places)
        t_peak, d_peak = tl.maximum(t_peaks, t), tl.maximum(d_peaks, d)
        shrink, weight = tl.exp(t_peaks - t_peak), tl.exp(t - t_peak)
        t_sums = t_sums * shrink + weight
        dots = dots * shrink + tl.where(inside, weight * d, 0.0)
        d_sums = d_sums * tl.exp(d_peaks - d_peak) + tl.exp(d - d_peak)
        t_peaks, d_peaks = t_peak, d_peak

    t_peak, d_peak = tl.max(t_peaks, axis=0), tl.max(d_peaks, axis=0)
    same = _first(t_peaks, t_places, t_peak, VOCABULARY) == _first(d_peaks, d_places, d_peak, VOCABULARY)
    weights = tl.exp(t_peaks - t_peak)
    t_sum = tl.sum(t_sums * weights, axis=0)
    d_sum = tl.sum(d_sums * tl.exp(d_peaks - d_peak), axis=0)
    ce = tl.log(d_sum) + d_peak - tl.sum(dots * weights, axis=0) / t_sum
    t_share, d_share = 1.0 / t_sum, 1.0 / d_sum  # a product costs a fraction of a division

    loss, kept, gained = ce, 1.0, 0.0
    if IS_LK:
        accepted_by_lane = tl.zeros([BLOCK], tl.float32)
        gained_by_lane = tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + lanes
            inside = columns < VOCABULARY
            t = _logit(target, columns, inside, bias, scale, cap, HAS_BIAS, HAS_CAP)
            d = _logit(draft, columns, inside, bias, scale, cap, HAS_BIAS, HAS_CAP)
            p, q = tl.exp(t - t_peak) * t_share, tl.exp(d - d_peak) * d_share
            accepted_by_lane += tl.minimum(p, q)
            gained_by_lane += tl.where(q < p, q, 0.0)
        accepted = tl.sum(accepted_by_lane, axis=0)
        gained = tl.sum(gained_by_lane, axis=0)
        kept = tl.exp(-LK_RATE * accepted)  # the cross-entropy's weight
        loss = kept * ce + (1.0 - kept) * (1.0 - accepted)

    if WITH_GRADIENT:
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + lanes
            inside = columns < VOCABULARY
            t = _logit(target, columns, inside, bias, scale, cap, HAS_BIAS, HAS_CAP)
            d = _logit(draft, columns, inside, bias, scale, cap, HAS_BIAS, HAS_CAP)
            p, q = tl.exp(t - t_peak) * t_share, tl.exp(d - d_peak) * d_share
            slope = kept * (q - p)
            if IS_LK:  # the gradient of the acceptance is q * (q < p) less q times what is gained in all
                slope -= (1.0 - kept) * q * (tl.where(q < p, 1.0, 0.0) - gained)
            if HAS_CAP:  # the derivative of cap * tanh(x / cap)
                slope *= 1.0 - (d / cap) * (d / cap)
            tl.store(draft + columns, slope.to(of_draft.dtype.element_ty), mask=inside)

    tl.store(sums + row * 3, loss)
    tl.store(sums + row * 3 + 1, ce)
    tl.store(sums + row * 3 + 2, same.to(tl.float32))
