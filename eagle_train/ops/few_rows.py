"""The product of few rows with a weight matrix by a Triton kernel on a GPU.

It is bound by reading the weight, which wants many programs with much to read at a time: each multiplies a small tile
of outputs with all rows, and sums have one order. Very few rows are multiplied by each thread itself, more by the
matrix unit. Which way is fastest, and whether it is faster than torch's own product, is timed at the first call on each
GPU. The plain twin is `F.linear`. It may be recorded in CUDA graphs; torch.compile meets it as a part of `linear`
(ops/linear.py). Knows nothing of models.
"""

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.hardware import current, is_gpu
from eagle_train.ops.device_time import gpu_seconds
from eagle_train.ops.kernels import is_plain, starts_triton

__all__ = ["DTYPES", "MOST_ROWS", "Way", "fastest", "product", "supports", "ways"]

DTYPES = (torch.bfloat16, torch.float16)
MOST_ROWS = 64  # a program has all of them at once
_LEAST_ROWS = 16  # the matrix unit's
_MOST_VECTORS = 2  # rows; of more the threads' products take longer than reading
_ALIGNED = 16  # bytes of a load
_CALLS = 10  # of each way, to find the fastest one


class Way(NamedTuple):
    """How the product is divided among programs.

    `tile`: outputs of a program. `read`: elements of the weight that it reads at a time, or of the rows where these
    are more. `stages`: reads that are under way at a time. `warps`: of 32 threads. `by_matrix_unit`: or by the threads.
    """

    tile: int
    read: int
    stages: int
    warps: int = 4
    by_matrix_unit: bool = True

    def block(self, rows: int) -> int:
        """Inputs that are read at a time, where a program has so many rows."""
        return self.read // (max(self.tile, rows) if self.by_matrix_unit else self.tile)


# The fastest of some 80 for the matrices of Llama 3.1 8B on an H200, and one for GPUs with little shared memory.
_BY_VECTORS = (Way(1, 4096, 1, 8, False), Way(2, 4096, 1, 8, False), Way(4, 8192, 1, 8, False))
_BY_MATRIX_UNIT = (Way(16, 4096, 4), Way(32, 16384, 3), Way(64, 4096, 3), Way(64, 8192, 6))

_found: dict[tuple, Way | None] = {}  # the fastest way, or None for torch's product, by what decides it


def supports(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `product` takes x [..., K] and a weight [N, K] of these devices and sizes, without gradients."""
    (outputs, inputs), rows = weight.shape, x.numel() // max(1, x.shape[-1])
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    fits = outputs > 0 and 0 < rows <= MOST_ROWS and inputs * weight.itemsize % _ALIGNED == 0
    plain = type(x) is torch.Tensor and type(weight) in (torch.Tensor, nn.Parameter)  # and no part of a divided one
    if not fits or learns or not plain or x.dtype != weight.dtype or weight.dtype not in DTYPES:
        return False
    at_border = weight.is_contiguous() and weight.data_ptr() % _ALIGNED == 0
    return at_border and x.device == weight.device and _runs_on(weight.device) and not is_plain("linear")


def ways(rows: int, shared: int | None = None) -> list[Way]:
    """All ways for so many rows, on a GPU whose programs have `shared` bytes of shared memory; None: enough."""
    lanes = max(_LEAST_ROWS, _padded(rows))
    needed = {way: 2 * way.stages * way.block(lanes) * (way.tile + lanes) for way in _BY_MATRIX_UNIT}
    fitting = [way for way, size in needed.items() if shared is None or size <= shared]
    return [*(_BY_VECTORS if rows <= _MOST_VECTORS else ()), *fitting]


def fastest(x: torch.Tensor, weight: torch.Tensor) -> Way | None:
    """The way in which `product` is supported, and faster on this GPU than torch's product and in other ways; None if
    there is none.

    All are timed at the first call with so many rows, to the next power of two, and a weight of this shape; within a
    recording of a CUDA graph nothing is timed, and what was not before counts as slower.
    """
    if not supports(x, weight):
        return None
    rows = x.numel() // x.shape[-1]
    key = (weight.device, weight.shape, weight.dtype, _padded(rows))
    if key not in _found:
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        works: dict[Way | None, Any] = {None: partial(F.linear, x, weight)}
        works |= {way: partial(product, x, weight, way=way) for way in ways(rows, _shared_memory(weight.device))}
        seconds = {way: gpu_seconds(work, weight.device, _CALLS) for way, work in works.items()}
        _found[key] = min(seconds, key=lambda way: seconds[way])
    return _found[key]


@cache
def _runs_on(device: torch.device) -> bool:
    return is_gpu(device, (8, 0)) and starts_triton()


@cache
def _shared_memory(device: torch.device) -> int | None:
    """Bytes that a program may have; ROCm has one number for them."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, way: Way = _BY_MATRIX_UNIT[0]
) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], all of one dtype; `way`: one of `ways`.

    The host waits for nothing, and shapes alone decide what is launched.
    """
    (outputs, inputs), rows = weight.shape, x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], outputs)
    by_matrix_unit, by_vectors = _kernels()
    kernel = by_matrix_unit if way.by_matrix_unit else by_vectors
    with current(weight.device):
        kernel[(-(-outputs // way.tile),)](
            x.reshape(rows, inputs).contiguous(),
            weight,
            weight if bias is None else bias,
            out,
            rows,
            outputs,
            INPUTS=inputs,
            HAS_BIAS=bias is not None,
            # Triton's interpreter has no products of bf16.
            **({"IN_FP32": weight.device.type == "cpu"} if way.by_matrix_unit else {}),
            **_layout(rows, way),
        )
    return out


def _padded(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


def _layout(rows: int, way: Way) -> dict[str, int]:
    """The kernel's sizes for so many rows."""
    lanes = max(_LEAST_ROWS if way.by_matrix_unit else 1, _padded(rows))
    return {
        "ROWS": lanes,
        "TILE": way.tile,
        "BLOCK": way.block(lanes),
        "num_warps": way.warps,
        "num_stages": way.stages,
    }


@cache
def _kernels() -> tuple[Any, Any]:
    """Triton is imported when a GPU needs it: a CPU's installation may have none."""
    from eagle_train.ops.few_rows_kernel import product_by_vectors, product_of_tile

    return product_of_tile, product_by_vectors
