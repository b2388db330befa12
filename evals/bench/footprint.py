"""The memory that a drafter takes beside the target, as far as it can be counted.

Knows nothing of how drafters draft.
"""

import gc
import mmap
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from eagle_train.inference import Drafter
from eagle_train.inference.cache.block_ends import BlockEnds
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.models.target import Target

_VALUES = (str, bytes, int, float, type, ModuleType, FunctionType, MethodType, BuiltinFunctionType)
_CLOSED = (*_VALUES, PagedKV, BlockEnds)  # not looked into


def weight_bytes(drafter: Drafter, target: Target) -> int:
    """Bytes of the tensors that the drafter holds, caches left out, and that are not the target's."""
    own = dict(_storages(drafter))
    for place, _ in _storages(target):
        own.pop(place, None)
    return sum(own.values())


def cache_bytes_per_token(drafter: Drafter) -> int:
    """Bytes of a token's keys and values in all of the drafter's caches, and of its share of what blocks have else."""
    tensors = [each for cache in drafter.caches for each in cache.memory]
    of_blocks = sum(each.hidden.element_size() * each.hidden.shape[1] for each in drafter.block_states)
    return sum(x.element_size() * x.shape[0] * x.shape[2:].numel() for x in tensors) + of_blocks // BLOCK


def file_bytes(drafter: Drafter) -> int:
    """Bytes of the files that the drafter reads as memory."""
    return sum(len(each) for each in _reached(drafter) if isinstance(each, mmap.mmap))


def traced_bytes(work: Callable[[], Any]) -> int:
    """The most bytes that Python's objects took during `work` beyond those before it. What torch allocates is not
    counted; `work` is slower meanwhile. Not for a process whose threads run outside Python, as ranks' do: tracemalloc
    has a known race with them in Python 3.11, which crashes."""
    gc.collect()
    tracemalloc.start()
    work()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


def _storages(holder: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of each tensor's storage, on this rank, that can be reached from `holder`."""
    for each in _reached(holder):
        if isinstance(each, torch.Tensor):
            local = getattr(each, "to_local", None)  # of one that ranks divide: this rank's part
            storage = (each if local is None else local()).untyped_storage()
            yield storage.data_ptr(), storage.nbytes()


def _reached(holder: Any) -> Iterator[Any]:
    """Tensors and mapped files that attributes and containers lead to from `holder`."""
    waiting, seen = [holder], set[int]()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen or isinstance(each, _CLOSED):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor | mmap.mmap):
            yield each
            continue
        waiting += _held(each)


def _held(holder: Any) -> Iterable[Any]:
    if isinstance(holder, Mapping):
        return list(holder.values())
    if isinstance(holder, list | tuple | set | frozenset):
        return list(holder)
    found = list(getattr(holder, "__dict__", {}).values())
    base = getattr(holder, "base", None)  # of a numpy array: the file that it maps
    found += [base] if isinstance(base, mmap.mmap) else []
    return [*found, *holder.parameters(), *holder.buffers()] if isinstance(holder, nn.Module) else found
