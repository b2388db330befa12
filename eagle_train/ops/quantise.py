"""Weights in few bits: codes and scales, and back. Knows nothing of products, modules or files.

Both formats are what serving engines load: INT4, symmetric, in groups of 128 along a row, and FP8 (E4M3) with a scale
for each row. Paper table 2. Both round to nearest, or, where the second moments of the inputs are known, with error
feedback (GPTQ, arXiv 2210.17323). Shapes: N outputs, K inputs, G = K / GROUP groups of a row.
"""

from collections.abc import Callable

import torch

GROUP = 128  # weights that share an INT4 scale
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
TINY = torch.finfo(torch.float32).tiny  # the scale where everything is zero

# How many steps of its scale the largest weight of an INT4 group may be. 7 and 8 are where the codes end; 9 clips the
# largest, and all others have finer steps. The best of the three errs a quarter less than 7 alone (squared, on normal
# weights).
STEPS = (7, 8, 9)

DAMPING = 0.01  # added to each input's second moment, in parts of their mean

Codes = Callable[[torch.Tensor], torch.Tensor]  # weights in steps of their scale to codes
Scales = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # a group's weights [N, C] and what an error costs [C]


def int4(weight: torch.Tensor, moments: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] as codes, int8 [N, K] from -8 to 7, and scales, bf16 [N, G]: each group's best by STEPS.

    Codes are chosen for the scale that is kept, the rounded one: a weight that came from `dequantise` comes back as it
    is. `moments` [K, K]: `fed_back`'s.
    """
    weight = weight.float()
    if moments is not None:
        codes, scales = fed_back(weight, moments, int4_scales, int4_codes)
        return codes.to(torch.int8), scales.bfloat16()
    groups = weight.unflatten(1, (-1, GROUP))
    scales = int4_scales(groups, torch.ones(GROUP, device=weight.device))
    return int4_codes(groups / scales).flatten(1).to(torch.int8), scales.squeeze(-1).bfloat16()


def int4_scales(groups: torch.Tensor, costs: torch.Tensor) -> torch.Tensor:
    """The best scales [..., 1] of groups [..., GROUP] by STEPS, when a squared error costs so much [GROUP]."""
    largest = groups.abs().amax(-1, keepdim=True)
    scales = torch.stack([(largest / steps).bfloat16().float().clamp(min=TINY) for steps in STEPS])
    errors = (int4_codes(groups / scales) * scales - groups).square() * costs
    return scales.take_along_dim(errors.sum(-1, keepdim=True).argmin(0, keepdim=True), 0).squeeze(0)


def int4_codes(steps: torch.Tensor) -> torch.Tensor:
    return steps.round().clamp(-8, 7)


def fp8(values: torch.Tensor, moments: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """values [..., K], weights or activations, as codes, FP8 [..., K], and scales, fp32 [..., 1].

    `moments` [K, K], for weights [N, K]: `fed_back`'s.
    """
    values = values.float()
    scales = (values.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=TINY)
    if moments is not None:
        return fed_back(values, moments, lambda *_: scales, fp8_codes)[0].to(FP8), scales
    return (values / scales).to(FP8), scales


def fp8_codes(steps: torch.Tensor) -> torch.Tensor:
    return steps.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()  # some releases of torch make NaN of what lies beyond


def fed_back(
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
    factor = upper_factor(moments).to(weight.dtype)
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


def upper_factor(moments: torch.Tensor) -> torch.Tensor:
    """The upper triangular R [K, K], fp64, with R R^T the damped moments: Cholesky's, from the last input up."""
    mean = moments.diagonal().double().mean().clamp(min=TINY)
    damped = moments.double() / mean + DAMPING * torch.eye(len(moments), dtype=torch.float64, device=moments.device)
    return torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)


def dequantise(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes [N, K] and scales [N, groups of a row] stand for, fp32 [N, K]."""
    groups = codes.float().unflatten(1, (scales.shape[1], -1))
    return (groups * scales.float().unsqueeze(-1)).flatten(1)


def two_a_byte(codes: torch.Tensor) -> torch.Tensor:
    """INT4 codes [N, K] as uint8 [N, K / 2]: plus 8 each, the even ones in the upper half."""
    codes = (codes + 8).to(torch.uint8)
    return codes[:, ::2] << 4 | codes[:, 1::2]


def one_a_byte(halves: torch.Tensor) -> torch.Tensor:
    """`two_a_byte`'s codes again, int8."""
    return torch.stack((halves >> 4, halves & 15), dim=-1).flatten(1).to(torch.int8) - 8
