"""Whether a step's gradient may be followed, judged by its norm. Knows nothing of what the gradient is of."""

import math
import statistics

_RECENT = 64  # norms of the last steps, to whose median the next is compared
_FEWEST = 4  # norms before anything is usual: one odd norm among four does not move the median


def is_sound(norm: float, recent: list[float], limit: float) -> bool:
    """Whether a gradient norm is finite and at most `limit` times the median of the recent ones."""
    usual = statistics.median(recent) if len(recent) >= _FEWEST else math.inf
    return math.isfinite(norm) and norm <= limit * usual


def appended(recent: list[float], norm: float) -> list[float]:
    """The recent norms after a sound step.

    A step without a supervised slot has norm 0. It is left out, because any later gradient would be a runaway.
    """
    return [*recent[1 - _RECENT :], norm] if norm > 0 else recent
