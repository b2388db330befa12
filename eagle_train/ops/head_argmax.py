"""The most likely token of few hidden states by Triton kernels on a GPU: an LM head's product whose logits stay inside.

The weight is read once and nothing else counts: logits of a vocabulary of 128,256 are not written, and not read again.
Each program multiplies a tile of the vocabulary with all hidden states and keeps, for each of these, the tile's
greatest logit with its token; a second kernel finds the greatest of all tiles. The plain twin is `LMHead.greatest`
without it (models/head.py): the product, and torch's max. Both may be recorded in CUDA graphs; torch.compile meets
neither, because drafts are proposed between compiled forwards. Knows nothing of drafts, models or ranks.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from eagle_train.hardware import current, is_gpu
from eagle_train.ops.device_time import gpu_seconds
from eagle_train.ops.kernels import is_plain, starts_triton

__all__ = ["MOST_ROWS", "head_argmax", "pays", "supports"]

DTYPES = (torch.bfloat16, torch.float16)
MOST_ROWS = 64  # a program has all of them at once
_LEAST_ROWS = 16  # the matrix unit's
_READ = 8192  # elements of the weight that a program reads at a time
_LANES = 1024  # tiles, of which the best is found at a time
_ALIGNED = 16  # bytes of a load
_CALLS = 20  # of each way, to find the faster one

_found: dict[tuple, bool] = {}  # whether the kernels are the faster way, by what decides it


def supports(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `head_argmax` takes hidden states [..., H] and an LM head's weight [V, H] of these devices and sizes."""
    (tokens, inputs), rows = weight.shape, hidden.numel() // max(1, hidden.shape[-1])
    fits = tokens > 0 and 0 < rows <= MOST_ROWS and inputs * weight.itemsize % _ALIGNED == 0
    one_device = hidden.device == weight.device and _runs_on(weight.device)
    return fits and one_device and weight.dtype in DTYPES and weight.is_contiguous() and not is_plain("linear")


def pays(hidden: torch.Tensor, weight: torch.Tensor, by_logits: Callable[[], object]) -> bool:
    """Whether `head_argmax` is supported, and faster on this GPU than `by_logits`, which finds the same by logits.

    Both are timed at the first call with so many rows, to the next power of two, and a weight of this shape; within a
    recording of a CUDA graph nothing is timed, and what was not before counts as slower.
    """
    if not supports(hidden, weight):
        return False
    key = (weight.device, weight.shape, weight.dtype, _layout(hidden.numel() // hidden.shape[-1])["ROWS"])
    if key not in _found:
        if weight.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        by_kernel, device = partial(head_argmax, hidden, weight), weight.device
        _found[key] = gpu_seconds(by_kernel, device, _CALLS) < gpu_seconds(by_logits, device, _CALLS)
    return _found[key]


@cache
def _runs_on(device: torch.device) -> bool:
    return is_gpu(device, (8, 0)) and starts_triton()


def head_argmax(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The greatest logit fp32 [..., 1] and the lowest token int64 [..., 1] that has it, after hidden states [..., H].

    `weight` [V, H], with rows side by side, and `bias` [V] are of one dtype, that of the products; `hidden` is cast to
    it. A logit is (hidden @ weight.T + bias) * scale. NaN counts as the greatest, as with torch.argmax. A `softcap`
    keeps the order, so it is computed for the logit that is returned alone; tokens whose logits would be equal by the
    cap's rounding are told apart here. The host waits for nothing, and shapes alone decide what is launched.
    """
    (vocabulary, inputs), rows = weight.shape, hidden.numel() // hidden.shape[-1]
    assert weight.is_contiguous()
    states, layout = hidden.to(weight.dtype).reshape(rows, inputs).contiguous(), _layout(rows)
    tiles = -(-vocabulary // layout["TILE"])
    best = torch.empty(rows, tiles, dtype=torch.int64, device=weight.device)
    value = torch.empty(*hidden.shape[:-1], 1, dtype=torch.float32, device=weight.device)
    token = torch.empty_like(value, dtype=torch.int64)
    best_of_tile, best_of_row = _kernels()
    cap, has_cap = (1.0, False) if softcap is None else (softcap, True)
    with current(weight.device):
        best_of_tile[(tiles,)](
            states,
            weight,
            weight if bias is None else bias,
            best,
            rows,
            scale,
            VOCABULARY=vocabulary,
            INPUTS=inputs,
            HAS_BIAS=bias is not None,
            HAS_SCALE=scale != 1.0,
            IN_FP32=weight.device.type == "cpu",  # Triton's interpreter has no products of bf16
            **layout,
        )
        best_of_row[(rows,)](best, value, token, cap, TILES=tiles, HAS_CAP=has_cap, LANES=_LANES, num_warps=4)
    return value, token


def _layout(rows: int) -> dict[str, int]:
    """The kernel's sizes for so many rows. Each tile reads all of them, so where they are many, tiles are larger."""
    lanes = max(_LEAST_ROWS, 1 << (rows - 1).bit_length())
    tile, stages = (64, 3) if lanes == _LEAST_ROWS else (128, 4)
    return {"ROWS": lanes, "TILE": tile, "BLOCK": _READ // tile, "num_warps": 4, "num_stages": stages}


@cache
def _kernels() -> tuple[Any, Any]:
    """Triton is imported when a GPU needs it: a CPU's installation may have none."""
    from eagle_train.ops.head_argmax_kernel import best_of_row, best_of_tile

    return best_of_tile, best_of_row
