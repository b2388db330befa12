"""A number of a result."""

from collections.abc import Sequence
from dataclasses import dataclass

Interval = Sequence[float] | None


@dataclass(frozen=True)
class Figure:
    """A number of a result. `of`: drafter, tree and batch size, say; `interval`: of 95 %, or None; `is_time`: whether
    it depends on the speed of the machine; `more_is_better`; `control`: the same time of plain decoding in the same
    run, which changes with the machine."""

    of: str
    name: str
    value: float
    interval: Interval = None
    more_is_better: bool = True
    is_time: bool = False
    batch_size: int | None = None
    control: float | None = None
