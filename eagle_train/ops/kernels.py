"""Which kernels are used: the device's own, or their plain twins, for comparisons. Knows no models."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

from eagle_train.errors import one_line

KERNELS = ("attention", "experts", "linear", "loss")

_plain: set[str] = set()


def is_plain(kernel: str) -> bool:
    """Whether the plain twin of this kernel is to be used."""
    return kernel in _plain


@cache
def starts_triton() -> bool:
    """Whether Triton is installed and works on this machine's GPUs. Its driver is compiled when it is first asked for,
    which needs a C compiler and a directory that can be written (TRITON_CACHE_DIR): without them the plain twins do the
    work, after one warning."""
    if find_spec("triton") is None:
        return False
    try:
        from triton.runtime.driver import driver

        driver.active.get_current_device()
    except Exception as error:  # of any class: it runs a compiler, and loads what that made
        warnings.warn(
            f"Triton does not start, and kernels are torch's: {type(error).__name__}: {one_line(error)}", stacklevel=2
        )
        return False
    return True


@contextmanager
def plain(*kernels: str) -> Iterator[None]:
    """Use the plain twins of these meanwhile, in the whole process; the names are in KERNELS."""
    assert set(kernels) <= set(KERNELS), kernels
    new = set(kernels) - _plain
    _plain.update(new)
    try:
        yield
    finally:
        _plain.difference_update(new)
