"""Muon with its products in the precision that the device is made for. Knows nothing of learning rates or schedules.

Source of the method: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); of the size of a
step: Liu et al., "Muon is Scalable for LLM Training" (arXiv 2502.16982). torch's own Muon computes the same, in bf16 on
every device, which a CPU without bf16 products emulates: on an AVX2-only AMD EPYC a [1024, 256] x [256, 1024] product
takes 121 ms in bf16 and 8.9 ms in fp32 on one core.
"""

import math

import torch
from torch.distributed.tensor import DTensor

from eagle_train.hardware import low_precision

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic: the steepest at 0 that does not diverge
ITERATIONS = 5
EPS = 1e-7
TALL = 2  # rows over columns, or the other way round, from which on the small Gram matrix alone is iterated


class Muon(torch.optim.Muon):
    """torch's Muon, with its settings (Nesterov's momentum and five iterations, as is its default) and its state."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
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
                update = orthogonalised(parameter.grad.lerp(mean, momentum))  # Nesterov's
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(update, alpha=-lr * step_size(parameter.shape, group["adjust_lr_fn"]))


def step_size(shape: torch.Size, rule: str | None) -> float:
    """What an orthogonal matrix is multiplied with: so that a step is as large as AdamW's, or the first source's."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1, rows / columns))


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix [N, K] with its singular values all near 1, by Newton and Schulz's iteration, in `low_precision`."""
    dtype = low_precision(matrix.device)
    x = matrix.to(dtype)
    x = x.T if len(x) > x.shape[1] else x
    x = x / x.norm().clamp(min=EPS)
    few, many = x.shape
    small = dtype == torch.float32 and many >= TALL * few and not isinstance(x, DTensor)  # whose diagonal is no view
    x = by_gram(x) if small else directly(x)
    return x.T if len(matrix) > matrix.shape[1] else x


def flops(shape: torch.Size, wide: bool = True) -> int:
    """Multiplications and additions of a matrix's `orthogonalised`; `wide`: in fp32, where `by_gram` may serve."""
    few, many = min(shape), max(shape)
    if wide and many >= TALL * few:
        return 2 * (2 * few * few * many + (4 * ITERATIONS - 3) * few**3)
    return 2 * ITERATIONS * (2 * few * few * many + few**3)


def directly(x: torch.Tensor) -> torch.Tensor:
    """The iteration as it is written: x becomes a x + b (x x') x + c (x x')^2 x."""
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def by_gram(x: torch.Tensor) -> torch.Tensor:
    """The same for a wide x [M, N]: each iteration multiplies x from the left by a polynomial of x x', and these are
    all M x M. 0.55 of the multiplications of `directly` for N = 4 M. Not for bf16, in which x x' loses too much."""
    a, b, c = COEFFICIENTS
    gram, product = x @ x.T, None
    for number in range(ITERATIONS):
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal().add_(a)
        product = factor if product is None else factor @ product
        if number < ITERATIONS - 1:
            gram = factor @ (gram @ factor)
    return product @ x
