"""How many of a CPU's threads a model's products are worth. Knows no models."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

LEAST_WORK, LEAST_ELEMENTS = 2**23, 2**18
"""Multiplications of a product, and elements of its matrix, from which on a second thread brings more than it costs to
wake it: much work, or much to be read from memory.

Two Zen 4 cores, torch 2.13, threads that wait asleep (OMP_WAIT_POLICY=passive), matrices of 124,000 elements on
average: a round of 1 token takes 0.82 of the time with one thread that it takes with two, one of 4 rows in chains of
three 0.72, of 16 rows 0.89; with one of the cores busy. Matrices of 800,000 elements take a thread 0.26 ms, and were
not measured with more.
"""

LEAST_KEYS = 3 * 2**18
"""Elements of the keys of an attention call from which on further threads bring more than it costs to wake them.

A Xeon with AMX, two cores, torch 2.13, passive threads, heads of 64, 12 layers with products between them, one thread
and two for attention alone: 8 rows x 512 keys (2^19 elements) 6.72 and 6.82 ms, 8 x 1,024 (2^20) 10.8 and 9.3, with
four queries a row 16.3 and 12.4, 1 x 4,096 5.67 and 6.29.
"""

_AS_IT_IS = nullcontext()
_outside: list[int] = []  # the numbers of threads before each `threads_for` that took all but one


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """So many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def threads_for(rows: int, elements: float) -> Iterator[None]:
    """One thread meanwhile, where products of so many rows with matrices of so many elements are small; else as many as
    there are. A thread of the process that uses torch for the first time meanwhile keeps the one."""
    if torch.get_num_threads() == 1 or rows * elements >= LEAST_WORK or elements >= LEAST_ELEMENTS:
        yield
        return
    _outside.append(torch.get_num_threads())
    try:
        with num_threads(1):
            yield
    finally:
        _outside.pop()


def threads_for_keys(elements: int) -> AbstractContextManager[None]:
    """All threads again within `threads_for`, for attention over keys of so many elements, where that pays."""
    return num_threads(_outside[-1]) if _outside and elements >= LEAST_KEYS else _AS_IT_IS
