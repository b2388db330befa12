"""The Triton kernels of head_argmax.py, which says what they compute. Internal: imports Triton, which GPUs have.

A logit and its token are one int64: the logit's bits in the upper half, so that integers have the order of the logits,
and in the lower half what the token lacks to the greatest int32. The maximum of these has the greatest logit, and of
equal ones the lowest token, in whatever order it is found.
"""

# Triton reads these functions' source, and knows their arguments by position: annotations say nothing to it.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from eagle_train.ops.few_rows_kernel import sums_of_tile

_GREATEST = tl.constexpr(2147483647)  # int32; as a logit's bits it is a NaN, and its order is above infinity's
_NONE = tl.constexpr(-9223372036854775807)  # below all that a logit may be


@triton.jit(do_not_specialize=["rows"])
def best_of_tile(
    hidden,
    weight,
    bias,
    best,
    rows,
    scale,
    VOCABULARY: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """One tile of the vocabulary: each row's best token of it, into best [rows, tiles]. ROWS: rows, up to a power of
    two."""
    tile, row = tl.program_id(0), tl.arange(0, ROWS)
    token, inside = tile * TILE + tl.arange(0, TILE), row < rows
    known = token < VOCABULARY
    weight += tile.to(tl.int64) * TILE * INPUTS + tl.arange(0, TILE)[:, None] * INPUTS
    sums = sums_of_tile(hidden, weight, bias, token, inside, known, INPUTS, ROWS, TILE, BLOCK, HAS_BIAS, IN_FP32)
    # Rounded as the plain logits are: what is equal there is equal here, and only the order of the sums can differ.
    logits = sums.to(weight.dtype.element_ty).to(tl.float32)
    if HAS_SCALE:
        logits = (logits * scale).to(weight.dtype.element_ty).to(tl.float32)
    found = tl.max(tl.where(known[:, None], _packed(logits, token[:, None]), _NONE), axis=0)
    tl.store(best + row.to(tl.int64) * tl.num_programs(0) + tile, found, mask=inside)


@triton.jit
def _packed(logits, token):
    """A logit and its token as one int64."""
    logits = tl.where(logits == 0.0, 0.0, logits)  # 0 and -0 are equal
    bits = logits.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ _GREATEST, bits)  # of negative numbers, the greater the bits, the lower
    order = tl.where(logits != logits, _GREATEST, order)
    return (order.to(tl.int64) << 32) | (token ^ _GREATEST).to(tl.int64)


@triton.jit
def best_of_row(best, value, token, cap, TILES: tl.constexpr, HAS_CAP: tl.constexpr, LANES: tl.constexpr):
    """One row: the best of its tiles, as logit and token."""
    row, lanes = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    best += row * TILES
    found = tl.full([LANES], _NONE, tl.int64)
    for start in range(0, TILES, LANES):
        found = tl.maximum(found, tl.load(best + start + lanes, mask=start + lanes < TILES, other=_NONE))
    most = tl.max(found, axis=0)
    order = (most >> 32).to(tl.int32)
    logit = tl.where(order < 0, order ^ _GREATEST, order).to(tl.float32, bitcast=True)
    if HAS_CAP:
        logit = cap * (2.0 * tl.sigmoid(2.0 * logit / cap) - 1.0)  # tanh
    tl.store(value + row, logit)
    tl.store(token + row, (most & _GREATEST) ^ _GREATEST)
