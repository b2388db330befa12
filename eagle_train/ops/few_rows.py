"""The product of few rows with a weight matrix by a Triton kernel on a GPU.

It is bound by reading the weight, which wants many programs with much to read at a time: each multiplies a small tile
of outputs with all rows, and sums have one order. Which size of tile is fastest, and whether it is faster than torch's
own product, is timed at the first call on each GPU. The plain twin is `F.linear`. It may be recorded in CUDA graphs;
torch.compile meets it as a part of `linear` (ops/linear.py). Knows nothing of models.
"""

from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.hardware import is_gpu
from eagle_train.ops.device_time import gpu_seconds
from eagle_train.ops.kernels import is_plain

__all__ = ["DTYPES", "MOST_ROWS", "TILES", "fastest", "product", "supports"]

DTYPES = (torch.bfloat16, torch.float16)
MOST_ROWS = 64  # a program has all of them at once
_LEAST_ROWS = 16  # the matrix unit's
_READ = 4096  # elements of the weight that a program reads at a time, and of the rows at most: some GPUs have no more
# than 99 KiB for what is under way
_STAGES = 4  # reads that are under way at a time
TILES = (16, 32, 64)  # outputs of a program: 4,096 outputs are 256 programs of the first
_ALIGNED = 16  # bytes of a load
_CALLS = 10  # of each way, to find the fastest one

_found: dict[tuple, int | None] = {}  # the fastest tile, or None for torch's product, by what decides it


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


def fastest(x: torch.Tensor, weight: torch.Tensor) -> int | None:
    """The tile with which `product` is supported, and faster on this GPU than torch's product and other tiles; None if
    there is none.

    All are timed at the first call with so many rows, to the next power of two, and a weight of this shape; within a
    recording of a CUDA graph nothing is timed, and what was not before counts as slower.
    """
    if not supports(x, weight):
        return None
    key = (weight.device, weight.shape, weight.dtype, _lanes(x.numel() // x.shape[-1]))
    if key not in _found:
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        ways: dict[int | None, Any] = {tile: partial(product, x, weight, tile=tile) for tile in TILES}
        ways[None] = partial(F.linear, x, weight)
        seconds = {way: gpu_seconds(work, weight.device, _CALLS) for way, work in ways.items()}
        _found[key] = min(seconds, key=lambda way: seconds[way])
    return _found[key]


@cache
def _runs_on(device: torch.device) -> bool:
    return is_gpu(device, (8, 0)) and find_spec("triton") is not None


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tile: int = TILES[0]
) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed, plus bias [N], all of one dtype; `tile`: one of `TILES`.

    The host waits for nothing, and shapes alone decide what is launched.
    """
    (outputs, inputs), rows = weight.shape, x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], outputs)
    _kernel()[(-(-outputs // tile),)](
        x.reshape(rows, inputs).contiguous(),
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outputs,
        INPUTS=inputs,
        HAS_BIAS=bias is not None,
        IN_FP32=weight.device.type == "cpu",  # Triton's interpreter has no products of bf16
        **_layout(rows, tile),
    )
    return out


def _lanes(rows: int) -> int:
    return max(_LEAST_ROWS, 1 << (rows - 1).bit_length())


def _layout(rows: int, tile: int) -> dict[str, int]:
    """The kernel's sizes for so many rows."""
    lanes = _lanes(rows)
    return {"ROWS": lanes, "TILE": tile, "BLOCK": _READ // max(tile, lanes), "num_warps": 4, "num_stages": _STAGES}


@cache
def _kernel() -> Any:
    """Triton is imported when a GPU needs it: a CPU's installation may have none."""
    from eagle_train.ops.few_rows_kernel import product_of_tile

    return product_of_tile
