"""Whether it pays to divide a model's weights over ranks: what reading them takes against what the ranks' talk takes.

Knows nothing of models or requests.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from eagle_train.inference.parallel.tensor_parallel import Ranks

_BYTES = 2**26  # of the weight that is read to measure how fast: more than a cache holds
_CALLS = 10


class Speeds(NamedTuple):
    """What the first rank measured."""

    bytes_per_s: float  # of weights, in a product of one row
    collective_s: float  # of a sum of one row over the ranks


def pays(num_bytes: int, collectives: int, size: int, speeds: Speeds) -> bool:
    """Whether a forward of few rows is faster where each of `size` ranks reads its part of `num_bytes` of weights and
    all wait for each other `collectives` times than where each reads all."""
    whole = num_bytes / speeds.bytes_per_s
    return whole / size + collectives * speeds.collective_s < whole


def measured_speeds(ranks: Ranks, width: int, dtype: torch.dtype) -> Speeds:
    """The first rank's, the same on all, which must all call. `width`: of a row that is summed."""
    device = torch.device(ranks.device)
    weight = torch.zeros(_BYTES // dtype.itemsize // width, width, dtype=dtype, device=device)
    row = torch.zeros(1, width, dtype=dtype, device=device)
    own = torch.tensor(
        [len(weight) * width * dtype.itemsize / _seconds(lambda: row @ weight.t(), device),
         _seconds(lambda: ranks.sum(row), device)],
        dtype=torch.float64, device=device,
    )  # fmt: skip
    return Speeds(*ranks.agreed(own).tolist())


def _seconds(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """The median time of a call."""
    found = []
    for _ in range(_CALLS):
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        found.append(time.perf_counter() - started)
    return median(found)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
