"""Muon with its products in a dtype that the device computes natively. Knows nothing of learning-rate schedules.

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), for the method; Liu et al.,
"Muon is Scalable for LLM Training" (arXiv 2502.16982), for the size of an update. torch's own Muon computes the same in
bf16 on every device. A CPU without bf16 products emulates them: on an AVX2-only AMD EPYC a [1024, 256] x [256, 1024]
product takes 121 ms in bf16 and 8.9 ms in fp32 on one core.
"""

import math

import torch
from torch.distributed.tensor import DTensor

from eagle_train.hardware import low_precision

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial: the steepest at 0 that does not diverge
_ITERATIONS = 5
_EPS = 1e-7
_TALL = 2  # rows over columns, or columns over rows, from which on the small Gram matrix alone is iterated


class Muon(torch.optim.Muon):
    """torch's Muon, with its settings (by default Nesterov's momentum and five iterations) and its state."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None, "not used here"
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                mean = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
                update = _orthogonalised(parameter.grad.lerp(mean, momentum))  # Nesterov's momentum
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * _step_size(parameter.shape, group["adjust_lr_fn"]))


def _step_size(shape: torch.Size, rule: str | None) -> float:
    """The factor of an orthogonal update: so that it is as large as one of AdamW, or the first source's."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def _orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix [N, K] with all singular values near 1, by the Newton-Schulz iteration, in `low_precision`."""
    dtype = low_precision(matrix.device)
    x = matrix.to(dtype)
    x = x.T if len(x) > x.shape[1] else x
    x = x / x.norm().clamp(min=_EPS)
    few, many = x.shape
    small = dtype == torch.float32 and many >= _TALL * few and not isinstance(x, DTensor)  # whose diagonal is no view
    x = _by_gram(x) if small else _directly(x)
    return x.T if len(matrix) > matrix.shape[1] else x


def flops(shape: torch.Size, wide: bool = True) -> int:
    """Multiplications and additions of a matrix's update; `wide`: in fp32, where `_by_gram` is used if it is faster."""
    few, many = min(shape), max(shape)
    if wide and many >= _TALL * few:
        return 2 * (2 * few * few * many + (4 * _ITERATIONS - 3) * few**3)
    return 2 * _ITERATIONS * (2 * few * few * many + few**3)


def _directly(x: torch.Tensor) -> torch.Tensor:
    """The iteration as published: x becomes a x + b (x x') x + c (x x')^2 x."""
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _by_gram(x: torch.Tensor) -> torch.Tensor:
    """The same for a wide x [M, N]. Each iteration multiplies x from the left by a polynomial of x x', which is M x M;
    these are multiplied first. 0.55 of the multiplications of `_directly` for N = 4 M. Not for bf16, in which x x'
    loses too much precision.
    """
    a, b, c = _COEFFICIENTS
    gram = x @ x.T
    product: torch.Tensor | None = None
    for number in range(_ITERATIONS):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else factor @ product
        if number < _ITERATIONS - 1:
            gram = factor @ (gram @ factor)
    assert product is not None
    return product @ x
