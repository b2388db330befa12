"""What a Triton kernel moves between memory and processor, counted by Triton's interpreter."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from triton.runtime import interpreter


@contextmanager
def moved_bytes(weight: torch.Tensor) -> Iterator[Counter]:
    """Bytes that kernels have `read` and `written` so far, and read of `weight`, by loads and stores with a mask."""
    builder, moved = interpreter.interpreter_builder, Counter()
    load, store = builder.create_masked_load, builder.create_masked_store
    first, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes

    def width(pointers: interpreter.TensorHandle) -> int:
        return pointers.get_element_ty().primitive_bitwidth // 8

    def loading(pointers, mask, *others):
        at = pointers.data[mask.data]
        moved["weight"] += width(pointers) * int(((at >= first) & (at < end)).sum())
        moved["read"] += width(pointers) * at.size
        return load(pointers, mask, *others)

    def storing(pointers, value, mask, *others):
        moved["written"] += width(pointers) * int(mask.data.sum())
        return store(pointers, value, mask, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_masked_load", loading)
        patch.setattr(builder, "create_masked_store", storing)
        yield moved
