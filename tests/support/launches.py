"""Which kernels Triton would compile for launches on a GPU that need not be there. Nothing is computed."""

import inspect
from typing import Any

import torch
import triton.language as tl


class Launches:
    """In the place of kernels of Triton's interpreter. `made`: by kernel, what tells its compiled ones apart."""

    def __init__(self, kernels: tuple[Any, ...]):
        self.made: list[set[tuple]] = [set() for _ in kernels]
        self.kernels = tuple(map(_Kernel, kernels, self.made))


class _Kernel:
    def __init__(self, kernel: Any, made: set[tuple]):
        self.parameters, self.made = inspect.signature(kernel.fn).parameters, made
        self.any_number = set(kernel.kwargs["do_not_specialize"] or ())

    def __getitem__(self, grid: tuple[int, ...]) -> "_Kernel":
        return self

    def __call__(self, *given: Any, **named: Any) -> None:
        named |= dict(zip(self.parameters, given, strict=False))
        self.made.add(tuple((name, self.kind(name, value)) for name, value in sorted(named.items())))

    def kind(self, name: str, value: Any) -> Any:
        """What Triton looks at: constants and options, types, and of numbers whether they are 1 or multiples of 16."""
        is_constant = name not in self.parameters or self.parameters[name].annotation is tl.constexpr
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if is_constant:
            return value
        of_type = type(value), isinstance(value, int) and -(2**31) <= value < 2**31
        is_looked_at = isinstance(value, int) and name not in self.any_number
        return (*of_type, value == 1, value % 16 == 0) if is_looked_at else of_type
