"""Seconds of a function on a device: medians of runs that were warmed up. Knows nothing of what is timed."""

import time
from collections.abc import Callable
from statistics import median

from eagle_train.ops.device_time import gpu_seconds

WARM_UP = 3


def seconds_of(function: Callable[[], object], device: str, repeats: int) -> float:
    """The median of `repeats` runs after some that do not count. A GPU's are read from its own clock, without the wait
    for their start (ops/device_time.py)."""
    for _ in range(WARM_UP):
        function()
    if device.startswith("cuda"):
        return gpu_seconds(function, device, repeats)
    return median(_on_cpu(function) for _ in range(repeats))


def _on_cpu(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started
