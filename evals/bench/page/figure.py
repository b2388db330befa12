"""A number of a result."""

from collections.abc import Sequence
from dataclasses import dataclass

Interval = Sequence[float] | None


@dataclass(frozen=True)
class Figure:
    """A number of a result. `of`: drafter, tree and batch size, say; `interval`: of 95 %, or None; `is_time`: whether
    it depends on the speed of the machine; `more_is_better`; `control`: plain decoding's time between tokens, or to
    the first one, in the same run, which changes with the machine; `is_ratio`: whether the value is that time divided
    by another one of the run, so that most of such a change cancels; `is_count`: whether it was counted, so that it
    has no interval and needs none."""

    of: str
    name: str
    value: float
    interval: Interval = None
    more_is_better: bool = True
    is_time: bool = False
    batch_size: int | None = None
    control: float | None = None
    is_ratio: bool = False
    is_count: bool = False
