"""How many of a CPU's threads a model's products are worth. Knows no models."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

LEAST_WORK = 2**23
"""Multiplications of a product, from which on a second thread brings more than it costs to wake it.

Two Zen 4 cores, torch 2.13, threads that wait asleep (OMP_WAIT_POLICY=passive), matrices of 124,000 elements on
average: a round of 1 token takes 0.82 of the time with one thread that it takes with two, one of 4 rows in chains of
three 0.72, of 16 rows 0.89; with one of the cores busy.
"""


@contextmanager
def threads_for(work: float) -> Iterator[None]:
    """One thread meanwhile, where products have fewer than LEAST_WORK multiplications; else as many as there are."""
    before = torch.get_num_threads()
    if before == 1 or work >= LEAST_WORK:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
