"""The Triton kernel of few_rows.py, which says what it computes, and its sums for other kernels.

Internal: imports Triton, which GPUs have.
"""

# Triton reads these functions' source, and knows their arguments by position: annotations say nothing to it.
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def sums_of_tile(
    x,
    weight,
    bias,
    output,
    inside,
    known,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """fp32 [TILE, ROWS]: what the outputs `output` of all rows come to, not rounded yet. x: of the first row; weight:
    pointers to the tile's first inputs [TILE, 1]. `inside`, `known`: which rows and which outputs there are.

    The weight is the product's left side, of which the matrix unit takes many rows at a time, and few of the other.
    """
    lanes = tl.arange(0, BLOCK)
    weight += lanes
    x += tl.arange(0, ROWS)[:, None] * INPUTS + lanes
    sums = tl.zeros([TILE, ROWS], tl.float32)
    for start in range(0, INPUTS, BLOCK):
        there = start + lanes < INPUTS
        w = tl.load(weight + start, mask=known[:, None] & there, other=0.0)
        taken = tl.load(x + start, mask=inside[:, None] & there, other=0.0)
        if IN_FP32:
            w, taken = w.to(tl.float32), taken.to(tl.float32)
        sums = tl.dot(w, tl.trans(taken), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=known, other=0.0).to(tl.float32)[:, None]
    return sums


@triton.jit(do_not_specialize=["rows"])
def product_of_tile(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_FP32: tl.constexpr,
):
    """One tile of the outputs, of all rows. ROWS: rows, up to a power of two. Sums are rounded once."""
    row, output = tl.arange(0, ROWS), tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside, known = row < rows, output < outputs
    weight += output.to(tl.int64)[:, None] * INPUTS
    sums = sums_of_tile(x, weight, bias, output, inside, known, INPUTS, ROWS, TILE, BLOCK, HAS_BIAS, IN_FP32)
    out += row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(out, sums.to(out.dtype.element_ty), mask=known[:, None] & inside)


@triton.jit(do_not_specialize=["rows"])
def product_by_vectors(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """As `product_of_tile`, each thread with some of the inputs, whose products it adds up; their sums are added last.

    Where BLOCK gives each thread whole 16 bytes of inputs, what is read stays in the thread that reads it.
    """
    row, output, lanes = tl.arange(0, ROWS), tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    inside, known = row < rows, output < outputs
    weight += output.to(tl.int64)[None, :, None] * INPUTS + lanes[None, None, :]
    x += row[:, None, None] * INPUTS + lanes[None, None, :]
    sums = tl.zeros([ROWS, TILE, BLOCK], tl.float32)
    for start in range(0, INPUTS, BLOCK):
        there = (start + lanes < INPUTS)[None, None, :]
        w = tl.load(weight + start, mask=known[None, :, None] & there, other=0.0).to(tl.float32)
        sums += w * tl.load(x + start, mask=inside[:, None, None] & there, other=0.0).to(tl.float32)
    total = tl.sum(sums, axis=2)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=known, other=0.0).to(tl.float32)[None, :]
    out += row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=inside[:, None] & known[None, :])
