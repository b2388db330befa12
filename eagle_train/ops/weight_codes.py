"""Weights in few bits: codes and scales, and back. Knows nothing of products, modules or files.

Both formats are what serving engines load: INT4, symmetric, in groups of 128 along a row, and FP8 (E4M3) with a scale
for each row. Paper table 2. Scales are those by which the weights err least, squared; codes are the nearest or, where
the second moments of the inputs are known, have error feedback (GPTQ, arXiv 2210.17323). Shapes: N outputs, K inputs,
G = K / GROUP groups of a row.
"""

from collections.abc import Callable, Sequence

import torch

GROUP = 128  # weights that share an INT4 scale
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
TINY = torch.finfo(torch.float32).tiny  # the scale where everything is zero

# How many steps of its scale the largest weight of an INT4 group may be. 7 and 8 are where the codes end; with more the
# largest is clipped, and all others have finer steps. Formats and kernels take a scale below 0 as they take any: it
# gives the code -8, which has no opposite, to the other side. The best of the 14 errs a third less than 7 alone
# (squared, on normal weights and on a trained draft's); many more gain another hundredth.
STEPS = tuple(sign * halves / 2 for sign in (1, -1) for halves in range(14, 21))

# The code that the largest weight of an FP8 row may become, one for each mantissa: steps double at powers of 2, so it
# counts where a row's weights fall between them. The best of the eight errs a tenth to a sixth less than 448 alone. 256
# is first, because of scales that do equally well it divides exactly.
TOPS = (256, 448, 416, 384, 352, 320, 288, 240)

PIECE = 2**18  # weights whose scales are sought at a time: they stay in a CPU's cache, and copies of them are small

DAMPING = 0.01  # added to each input's second moment, in parts of their mean

Codes = Callable[[torch.Tensor], torch.Tensor]  # weights in steps of their scale to codes
Scales = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # a group's weights [N, C] and what an error costs [C]


def quantise_int4(weight: torch.Tensor, moments: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] as codes, int8 [N, K] from -8 to 7, and scales, bf16 [N, G]: each group's best by STEPS.

    Codes are chosen for the scale that is kept, the rounded one: a weight that came from `dequantise` comes back as it
    is. `moments` [K, K]: `_quantise_with_feedback`'s.
    """
    weight = weight.float()
    if moments is not None:
        codes, scales = _quantise_with_feedback(weight, moments, _int4_scales, _int4_codes)
        return codes.to(torch.int8), scales.bfloat16()
    groups = weight.unflatten(1, (-1, GROUP))
    scales = _int4_scales(groups, torch.ones(GROUP, device=weight.device))
    return _int4_codes(groups / scales).flatten(1).to(torch.int8), scales.squeeze(-1).bfloat16()


def _int4_scales(groups: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    return _best_scales(groups, costs, STEPS, torch.bfloat16, _int4_codes)


def _int4_codes(steps: torch.Tensor) -> torch.Tensor:
    return steps.round().clamp(-8, 7)


def quantise_fp8(weight: torch.Tensor, moments: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] as codes, FP8 [N, K], and scales, fp32 [N, 1]: each row's best by TOPS.

    `moments` [K, K]: see `_quantise_with_feedback`. They choose codes, not scales: costs of their diagonal gained
    nothing measurable.
    """
    weight = weight.float()
    scales = _best_scales(weight, weight.new_ones(weight.shape[1]), TOPS, torch.float32, _fp8_codes)
    if moments is not None:
        return _quantise_with_feedback(weight, moments, lambda *_: scales, _fp8_codes)[0].to(FP8), scales
    return (weight / scales).to(FP8), scales


def _fp8_codes(steps: torch.Tensor) -> torch.Tensor:
    return steps.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()  # some releases of torch make NaN of what lies beyond


def quantise_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations [..., K] as codes, FP8 [..., K], and scales, fp32 [..., 1]: the largest becomes FP8_MAX.

    So serving engines do it, in every call; a search would cost more than the product.
    """
    x = x.float()
    scales = (x.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=TINY)
    return (x / scales).to(FP8), scales


def _best_scales(
    groups: torch.Tensor, costs: torch.Tensor, tried: Sequence[float], dtype: torch.dtype, codes_of: Codes
) -> torch.Tensor:
    """The scales [..., 1] by which groups [..., C] err least, when a squared error costs so much [C].

    `tried`: how many steps of its scale a group's largest may be; of equals the first is taken. Scales are fp32, as
    rounded as `dtype` keeps them, and never 0.
    """
    pieces = groups.split(max(1, PIECE // groups[0].numel()))
    return torch.cat([_best_scales_of_piece(piece, costs, tried, dtype, codes_of) for piece in pieces])


def _best_scales_of_piece(
    groups: torch.Tensor, costs: torch.Tensor, tried: Sequence[float], dtype: torch.dtype, codes_of: Codes
) -> torch.Tensor:
    """As `_best_scales`, of so few groups that all fit a cache."""
    largest = groups.abs().amax(-1, keepdim=True)
    best: torch.Tensor | None = None
    lowest: torch.Tensor | None = None
    for most in tried:
        scales = (largest / most).to(dtype).float()
        scales = torch.where(scales.abs() < TINY, TINY, scales)
        steps = groups / scales
        relative = scales / largest.clamp(min=TINY)  # squares of the weights themselves might overflow
        errors = ((codes_of(steps) - steps).square() @ costs).unsqueeze(-1) * relative.square()
        if best is None or lowest is None:
            best, lowest = scales, errors
        else:
            best, lowest = torch.where(errors < lowest, scales, best), torch.minimum(errors, lowest)
    assert best is not None, "some scale is tried"
    return best


def _quantise_with_feedback(
    weight: torch.Tensor, moments: torch.Tensor, scales_of: Scales, codes_of: Codes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, K] and scales [N, groups of GROUP columns] of weight [N, K], both in its dtype, with error feedback.

    `moments` [K, K] is X^T X of inputs X [rows, K] as the layer has them, up to a factor. Columns are rounded one after
    another. With the moments as R R^T, R upper triangular, what errors E [N, K] cost the layer's outputs, the sum of
    |X E^T|^2, is that of (E R)^2, whose column j knows the errors up to its own only. It is rounded at the value that
    would make it 0. That is GPTQ's update by the inverse Hessian, without the inverse.

    Inputs that were always zero have moments of DAMPING alone, so they are rounded to nearest, as all are where nothing
    was seen.
    """
    factor = _upper_factor(moments).to(weight.dtype)
    codes, errors, scales = torch.empty_like(weight), torch.empty_like(weight), []
    for start in range(0, weight.shape[1], GROUP):
        here = slice(start, start + GROUP)
        own = factor[here, here]
        before = errors[:, :start] @ factor[:start, here]
        wanted = weight[:, here] + torch.linalg.solve_triangular(own, before, upper=True, left=False)
        scale = scales_of(wanted, own.diagonal().square())
        missed = torch.zeros_like(wanted)
        for column, place in enumerate(range(start, start + wanted.shape[1])):
            value = wanted[:, column] + missed[:, :column] @ own[:column, column] / own[column, column]
            codes[:, place] = codes_of(value / scale.squeeze(-1))
            missed[:, column] = wanted[:, column] - codes[:, place] * scale.squeeze(-1)
        errors[:, here] = weight[:, here] - codes[:, here] * scale
        scales.append(scale)
    return codes, torch.cat(scales, dim=1)


def _upper_factor(moments: torch.Tensor) -> torch.Tensor:
    """The upper triangular R [K, K], fp64, with R R^T the damped moments: Cholesky's, from the last input up."""
    mean = moments.diagonal().double().mean().clamp(min=TINY)
    damped = moments.double() / mean + DAMPING * torch.eye(len(moments), dtype=torch.float64, device=moments.device)
    return torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes [N, K] and scales [N, groups of a row] stand for, fp32 [N, K]."""
    groups = codes.float().unflatten(1, (scales.shape[1], -1))
    return (groups * scales.float().unsqueeze(-1)).flatten(1)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """INT4 codes [N, K] as uint8 [N, K / 2]: plus 8 each, the even ones in the upper half."""
    codes = (codes + 8).to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2]


def unpack_int4(halves: torch.Tensor) -> torch.Tensor:
    """`pack_int4`'s codes again, int8."""
    return torch.stack((halves >> 4, halves & 15), dim=-1).flatten(1).to(torch.int8) - 8
