"""The Triton kernel of fused_loss.py, which says what it computes. Internal: imports Triton, which GPUs have."""

# Triton reads these functions' source, and knows their arguments by position: annotations say nothing to it.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

_LEAST = tl.constexpr(-3.0e38)  # in fp32; of lanes that have seen no logit yet: -inf less itself would be NaN


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
    """One row: its loss, cross-entropy and agreement into sums [C, 3], its gradient in place of the draft's logits."""
    row = tl.program_id(0).to(tl.int64)
    target, draft = of_target + row * target_stride, of_draft + row * draft_stride
    rule = (bias, scale, cap)
    t_peak, t_sum, d_peak, d_sum, expected, same = _normalisers(
        target, draft, rule, VOCABULARY, HAS_BIAS, HAS_CAP, BLOCK
    )
    ce = tl.log(d_sum) + d_peak - expected
    norms = (t_peak, 1.0 / t_sum, d_peak, 1.0 / d_sum)  # a product costs a fraction of a division
    loss, kept, gained = ce, 1.0, 0.0
    if IS_LK:
        accepted, gained = _acceptance(target, draft, rule, norms, VOCABULARY, HAS_BIAS, HAS_CAP, BLOCK)
        kept = tl.exp(-LK_RATE * accepted)  # the cross-entropy's weight
        loss = kept * ce + (1.0 - kept) * (1.0 - accepted)
    if WITH_GRADIENT:
        for start in range(0, VOCABULARY, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < VOCABULARY
            p, q, d = _shares(target, draft, columns, inside, rule, norms, HAS_BIAS, HAS_CAP)
            slope = kept * (q - p)
            if IS_LK:  # the gradient of the acceptance is q * (q < p) less q times what is gained in all
                slope -= (1.0 - kept) * q * (tl.where(q < p, 1.0, 0.0) - gained)
            if HAS_CAP:  # the derivative of cap * tanh(x / cap)
                slope *= 1.0 - (d / cap) * (d / cap)
            tl.store(draft + columns, slope.to(of_draft.dtype.element_ty), mask=inside)
    tl.store(sums + row * 3, loss)
    tl.store(sums + row * 3 + 1, ce)
    tl.store(sums + row * 3 + 2, same.to(tl.float32))


@triton.jit
def _normalisers(
    target, draft, rule, VOCABULARY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr
):
    """Of target and draft, the greatest logit and the sum of exp(logit - greatest); the draft's logit that the target
    expects; and whether both have the same first greatest column. One pass, in which each lane has sums of its own."""
    lanes = tl.arange(0, BLOCK)
    t_peaks, d_peaks = tl.full([BLOCK], _LEAST, tl.float32), tl.full([BLOCK], _LEAST, tl.float32)
    t_places, d_places = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    t_sums, d_sums = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    dots = tl.zeros([BLOCK], tl.float32)  # of the draft's logits, weighted as the target's sums are
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + lanes
        inside = columns < VOCABULARY
        t = _logit(target, columns, inside, rule, HAS_BIAS, HAS_CAP)
        d = _logit(draft, columns, inside, rule, HAS_BIAS, HAS_CAP)
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
    return t_peak, t_sum, d_peak, d_sum, tl.sum(dots * weights, axis=0) / t_sum, same


@triton.jit
def _acceptance(
    target,
    draft,
    rule,
    norms,
    VOCABULARY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of min(p, q), and that of q where it is the smaller one."""
    accepted, gained = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCABULARY, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        p, q, _ = _shares(target, draft, columns, columns < VOCABULARY, rule, norms, HAS_BIAS, HAS_CAP)
        accepted += tl.minimum(p, q)
        gained += tl.where(q < p, q, 0.0)
    return tl.sum(accepted, axis=0), tl.sum(gained, axis=0)


@triton.jit
def _shares(target, draft, columns, inside, rule, norms, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """A block's probabilities of target and draft, and the draft's logits, [BLOCK] each."""
    t_peak, t_share, d_peak, d_share = norms
    t = _logit(target, columns, inside, rule, HAS_BIAS, HAS_CAP)
    d = _logit(draft, columns, inside, rule, HAS_BIAS, HAS_CAP)
    return tl.exp(t - t_peak) * t_share, tl.exp(d - d_peak) * d_share, d


@triton.jit
def _logit(row, columns, inside, rule, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """A block's logits [BLOCK] in fp32, -inf beyond the vocabulary's end."""
    bias, scale, cap = rule
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
