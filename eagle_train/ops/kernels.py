"""Which kernels are used: the device's own, or their plain twins, for comparisons. Knows no models."""

from collections.abc import Iterator
from contextlib import contextmanager

KERNELS = ("attention", "experts", "linear", "loss")

_plain: set[str] = set()


def is_plain(kernel: str) -> bool:
    """Whether the plain twin of this kernel is to be used."""
    return kernel in _plain


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
