"""A GPU's time for short work, for choices between kernels. Knows nothing of what is timed."""

from collections.abc import Callable
from statistics import median

import torch

__all__ = ["gpu_seconds"]

_CACHES = 4  # as many times the size of a GPU's cache are written before a call


def gpu_seconds(work: Callable[[], object], device: torch.device | str, calls: int) -> float:
    """The median seconds of some `calls` of a function on a GPU, after one that does not count.

    Before each the GPU's cache is overwritten, as the rest of a forward does it. That takes longer than the host takes
    to start the work, which is then timed without the wait for its start.
    """
    size = _CACHES * torch.cuda.get_device_properties(device).L2_cache_size
    with torch.cuda.device(device):
        other = torch.empty(size, dtype=torch.uint8, device=device)
        work()
        times = [_once(work, other) for _ in range(calls)]
        torch.cuda.synchronize(device)
        return median(first.elapsed_time(last) for first, last in times) / 1e3


def _once(work: Callable[[], object], other: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    other.zero_()
    first.record()
    work()
    last.record()
    return first, last
