"""Products of rows with the matrix of the expert that each row chose, of all experts at once. Knows no models.

Rows are sorted by expert, and where one's rows end is told to the kernel by a tensor on the device, so that the host
does not ask how many rows chose whom: in bf16 on Hopper and newer GPUs. Elsewhere torch's own grouped product asks once
for each product.

Shapes: R rows, E experts, N outputs, K inputs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # torch has no grouped product in others
_ALIGNED = 16  # bytes, of a row of every operand on a GPU


def supports(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether rows and matrices of these widths have a grouped product in this dtype on the device."""
    aligned = device.type == "cpu" or all(width * dtype.itemsize % _ALIGNED == 0 for width in widths)
    return dtype in DTYPES and aligned


def by_expert(experts: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's expert, int64 [R], below `number`: the rows in the order of their experts, int64 [R], and where each
    expert's rows end in it, int32 [E]."""
    ordered, order = experts.sort(stable=True)
    every = torch.arange(number, device=experts.device)
    return order, torch.searchsorted(ordered, every, right=True).int()


def swiglu(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's SwiGLU feed-forward of its own rows: [R, K] to [R, K], in the dtype of all.

    `rows` are sorted by expert and `ends` are those of `by_expert`; `gate_up` [E, 2N, K] has the gate's outputs first,
    `down` is [E, K, N]. Differentiable.
    """
    gate, up = grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    return grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)


def stacked(dtype: torch.dtype, *matrices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Each expert's matrices one below the other, in `dtype`: of P sequences of E matrices [N, K] one [E, P N, K].

    Casting is the copying: a stack of cast matrices would be two copies. Gradients return in the matrices' own dtypes.
    Under `stacks_kept` one of cast matrices is made once.
    """
    by_matrix = [matrix for each in matrices for matrix in each]
    if not _kept or by_matrix[0].dtype == dtype:
        return _Stacked.apply(dtype, len(matrices), *by_matrix)
    stacks, key = _kept[-1], (dtype, *map(id, by_matrix))
    if key not in stacks:
        stacks[key] = _Stacked.apply(dtype, len(matrices), *by_matrix)
    return stacks[key]


def cast_kept(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight's values in `dtype`, outside the graph of gradients; under `stacks_kept` a parameter is cast once."""
    if not _kept or weight.dtype == dtype:
        return weight.detach().to(dtype)
    casts, key = _kept[-1], (dtype, weight)  # not its id, which another tensor might have once it is gone
    if key not in casts:
        casts[key] = weight.detach().to(dtype)
    return casts[key]


_kept: list[dict[tuple[Any, ...], torch.Tensor]] = []  # a global: autograd's threads recompute layers


@contextmanager
def stacks_kept() -> Iterator[None]:
    """Meanwhile stacks of matrices that had to be cast are kept, with their place in the graph of gradients, and what
    `cast_kept` has cast. The matrices must stay as they are."""
    _kept.append({})
    try:
        yield
    finally:
        _kept.pop()


class _Stacked(torch.autograd.Function):
    """`stacked`, of P times E matrices."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, parts: int, *matrices: torch.Tensor) -> torch.Tensor:
        ctx.parts, ctx.dtypes = parts, [matrix.dtype for matrix in matrices]
        (height, width), experts = matrices[0].shape, len(matrices) // parts
        stack = matrices[0].new_empty(experts, parts, height, width, dtype=dtype)
        for number, matrix in enumerate(matrices):
            stack[number % experts, number // experts].copy_(matrix)
        return stack.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        own = gradient.unflatten(1, (ctx.parts, -1)).transpose(0, 1).flatten(0, 1).unbind()
        return None, None, *(each.to(dtype) for each, dtype in zip(own, ctx.dtypes, strict=True))
