"""Weights in few bits: codes and scales, and back. Knows nothing of products, modules or files.

Both formats are what serving engines load: INT4, symmetric, in groups of 128 along a row, and FP8 (E4M3) with a scale
for each row. Both round to nearest. Paper table 2. Shapes: N outputs, K inputs, G = K / GROUP groups of a row.
"""

import torch

GROUP = 128  # weights that share an INT4 scale
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
TINY = torch.finfo(torch.float32).tiny  # the scale where everything is zero

# How many steps of its scale the largest weight of an INT4 group may be. 7 and 8 are where the codes end; 9 clips the
# largest, and all others have finer steps. The best of the three errs a quarter less than 7 alone (squared, on normal
# weights).
STEPS = (7, 8, 9)


def int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] as codes, int8 [N, K] from -8 to 7, and scales, bf16 [N, G]: each group's best by STEPS.

    Codes are chosen for the scale that is kept, the rounded one: a weight that came from `dequantise` comes back as it
    is.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    scales = torch.stack([(largest / steps).bfloat16().float().clamp(min=TINY) for steps in STEPS])
    codes = (groups / scales).round().clamp(-8, 7)
    best = (codes * scales - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    codes, scales = codes.take_along_dim(best, 0).squeeze(0), scales.take_along_dim(best, 0).squeeze(0)
    return codes.flatten(1).to(torch.int8), scales.squeeze(-1).bfloat16()


def fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values [..., K], weights or activations, as codes, FP8 [..., K], and scales, fp32 [..., 1]."""
    values = values.float()
    scales = (values.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=TINY)
    return (values / scales).to(FP8), scales


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
