"""Root-mean-square norm in few operations, as decoding needs it. Knows no models.

A CPU has no kernel for it, so that a small one takes as long as its operations take to be called.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] over its root mean square, times weight [H]; fp32 statistics. `F.rms_norm` is its plain twin.

    On one Zen 4 core, 256 numbers take 8 us so and 13 otherwise; 16 as transformers' models do it.
    """
    plain = x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32
    if plain or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale = torch.addcmul(_scalar(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight)


@lru_cache(maxsize=16)
def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


class FastNorm:
    """What models/patches.py puts before a plain RMSNorm's own class: its parameters, and `rms_norm`."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.variance_epsilon)
