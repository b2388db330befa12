"""Seconds of a function on a device: medians of runs that were warmed up. Knows nothing of what is timed."""

import time
from collections.abc import Callable
from statistics import median

import torch

WARM_UP = 3


def seconds_of(function: Callable[[], object], device: str, repeats: int) -> float:
    """The median of `repeats` runs after some that do not count. A GPU's are read from its own clock."""
    for _ in range(WARM_UP):
        function()
    once = _on_gpu if device.startswith("cuda") else _on_cpu
    return median(once(function) for _ in range(repeats))


def _on_cpu(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _on_gpu(function: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    function()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3
