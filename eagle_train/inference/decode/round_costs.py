"""What a round takes, by its plan and batch size: measured at the start, and corrected by every round. DESIGN 3.5.

Knows nothing of requests or acceptance.
"""

import math
from collections.abc import Callable
from statistics import median

import numpy as np
from numpy.typing import NDArray

from eagle_train.inference.drafters.drafter import TreePlan
from eagle_train.inference.parallel.tensor_parallel import Ranks

# Standard deviations of the logarithm of a time.
_NOISE = 0.03  # of a round, about what is expected
_UNKNOWN = 1.0  # of all plans, before the first round of a batch size, and when something else begins or ends
_JUMPS = 0.1  # the share of rounds noted in which it does
_AT_THE_START = 0.1  # of a plan, as it was timed at the start, when something else may have run
_IN_PART = 0.4  # of its rounds in which some rows alone draft, by those in which all do
_DRIFT, _OWN_DRIFT = 0.03, 0.001  # in a round: of all plans, with contexts and other load, and of each plan
_UNSETTLED = 0.05  # of all plans, when other requests are in the batch: their contexts differ
_AT_ONCE, _MOST_AT_ONCE = 4, 32  # rounds, the first ones of a plan, and later ones
_OUTLIER = 3.0  # standard deviations: beyond, something else took the time
_TURNS, _IN_A_ROW = 2, 3

Kind = tuple[TreePlan, bool]
"""Of rounds: the plan, and whether some of the rows alone draft."""


class RoundCosts:
    """Seconds of rounds.

    At the start all plans are timed on an empty cache. What rounds take later differs, with the contexts and with what
    else the machine does: by one factor for all plans of a batch size, which changes, and a factor of its own for each
    plan, which hardly does. Both follow from rounds by a Kalman filter. It tells a plan's own factor from the other by
    rounds of other plans that lie near, and knows how well it is known. A plan's rounds in which some rows alone draft
    (`in_part`) have another own factor, near that of those in which all do.
    """

    def __init__(
        self,
        plans: list[TreePlan],
        sizes: list[int],
        seconds: Callable[[TreePlan, int], float],
        ranks: Ranks | None = None,
    ):
        """`seconds`: runs a round of a plan and a batch size, and times it. `ranks`: of one target; they agree on the
        times, and so on all that follows."""
        self._ranks = ranks or Ranks()
        self._sizes = sizes
        kinds = [(plan, in_part) for in_part in (False, True) for plan in plans]
        self._places = {kind: place for place, kind in enumerate(kinds, 1)}
        timed = {size: self._agreed(_timed(plans, size, seconds)) for size in sizes}
        self._base = {(plan, size): time for size in sizes for plan, time in zip(plans, timed[size], strict=True)}
        self._factors = {size: _Factors(len(plans)) for size in sizes}
        self._rows, self._kind = 0, kinds[0]  # of the last rounds, whose times wait
        self._times: list[float] = []
        self._at_once = _AT_ONCE

    def seconds(self, plan: TreePlan, rows: int, in_part: bool = False) -> float:
        """What a round is expected to take."""
        own = self._factors[self._size(rows)]
        known = own if own.is_known else self._nearest(rows)
        return self._between(plan, rows) * math.exp(known.of_all + own.of(self._places[plan, in_part]))

    def doubt(self, kind: Kind, other: Kind, rows: int) -> float:
        """The standard deviation of the logarithm of what rounds of one kind take by the other's."""
        return self._factors[self._size(rows)].doubt(self._places[kind], self._places[other])

    def observe(self, plan: TreePlan, rows: int, seconds: float, in_part: bool = False) -> None:
        """A round took so long. What follows is worked out for some rounds of a plan at once: it takes time too. The
        longer a plan goes on, the more. The first one behind another plan's does not count, as at the start."""
        kind = (plan, in_part)
        is_first = kind != self._kind
        if rows != self._rows or is_first:
            self._note()
            if rows != self._rows:
                self._factors[self._size(rows)].unsettle()
            self._rows, self._kind, self._at_once = rows, kind, _AT_ONCE
        if is_first:
            return
        self._times.append(seconds)
        if len(self._times) == self._at_once:
            self._note()
            self._at_once = min(2 * self._at_once, _MOST_AT_ONCE)

    def unsettle(self) -> None:
        """Other requests are in the batch than in the round before."""
        self._note()
        self._rows = 0

    def _note(self) -> None:
        """Work out what the times that wait say, by their median."""
        if self._times:
            (seconds,) = self._agreed([median(self._times)])
            off = math.log(seconds / self._between(self._kind[0], self._rows))
            self._factors[self._size(self._rows)].note(self._places[self._kind], off, len(self._times))
            self._times = []

    def _agreed(self, times: list[float]) -> list[float]:
        """The least of each of these seconds among the ranks."""
        return [number / 1e9 for number in self._ranks.least_of_hosts([round(1e9 * each) for each in times])]

    def _size(self, rows: int) -> int:
        """The measured batch size that is nearest."""
        return min(self._sizes, key=lambda size: abs(size - rows))

    def _nearest(self, rows: int) -> "_Factors":
        """Of the nearest batch size with rounds; of the own one where there is none."""
        known = [size for size in self._sizes if self._factors[size].is_known]
        return self._factors[min(known or [self._size(rows)], key=lambda size: abs(size - rows))]

    def _between(self, plan: TreePlan, rows: int) -> float:
        """Seconds at the start, interpolated between the measured batch sizes."""
        below = max((size for size in self._sizes if size <= rows), default=self._sizes[0])
        above = min((size for size in self._sizes if size >= rows), default=self._sizes[-1])
        low, high = self._base[plan, below], self._base[plan, above]
        return low if above == below else low + (high - low) * (rows - below) / (above - below)


class _Factors:
    """The logarithms of what times at the start are off by at a batch size: of all plans, at place 0, and each plan's
    own, at places from 1 on: of rounds in which all rows draft, and then of the others. The state of a Kalman filter:
    means, and covariances."""

    def __init__(self, plans: int):
        self.is_known = False
        self._last: int | None = None  # the place that was noted last, since when the batch is the same
        self._mean = np.zeros(1 + 2 * plans)
        self._cov = np.zeros((1 + 2 * plans,) * 2)
        self._cov[0, 0] = _UNKNOWN**2
        own = _AT_THE_START**2 * np.eye(plans)
        self._cov[1:, 1:] = np.block([[own, own], [own, own + _IN_PART**2 * np.eye(plans)]])
        self._drift = np.diag([_DRIFT**2] + [_OWN_DRIFT**2] * 2 * plans)

    @property
    def of_all(self) -> float:
        """Of all plans."""
        return float(self._mean[0])

    def of(self, place: int) -> float:
        """A plan's own."""
        return float(self._mean[place])

    def doubt(self, one: int, other: int) -> float:
        """The standard deviation of the difference of two."""
        cov = self._cov
        return math.sqrt(max(0.0, cov[one, one] + cov[other, other] - 2 * cov[one, other]))

    def unsettle(self) -> None:
        """That of all plans may have changed at once."""
        self._cov[0, 0] += _UNSETTLED**2
        self._last = None

    def note(self, place: int, off: float, rounds: int) -> None:
        """Rounds of a plan were off by so much, in the middle."""
        self.is_known = True
        self._cov += self._drift * rounds
        wrong = off - self._mean[0] - self._mean[place]
        is_other = self._last is not None and place != self._last  # another plan: it may be its own factor
        if not is_other and _is_jump(wrong, self._seen(place, rounds)[1]):
            self._cov[0, 0] += _UNKNOWN**2
        self._last = place
        seen, variance = self._seen(place, rounds)
        # What is far off counts as if it were less certain, as by Huber's loss.
        variance *= max(1.0, abs(wrong) / (_OUTLIER * math.sqrt(variance)))
        self._mean += seen * (wrong / variance)
        self._cov -= np.outer(seen, seen) / variance

    def _seen(self, place: int, rounds: int) -> tuple[NDArray[np.float64], float]:
        """The covariance of what is seen of a plan with everything, and its variance."""
        seen = self._cov[0] + self._cov[place]
        return seen, float(seen[0] + seen[place]) + _NOISE**2 / rounds


def _is_jump(wrong: float, variance: float) -> bool:
    """Whether what is off by so much says that times of all plans jumped: that is likelier then than what is expected.
    Else plans' own factors would take a part of it, and keep it."""
    after = variance + _UNKNOWN**2
    return wrong**2 / 2 * (1 / variance - 1 / after) - math.log(after / variance) / 2 > -math.log(_JUMPS)


def _timed(plans: list[TreePlan], size: int, seconds: Callable[[TreePlan, int], float]) -> list[float]:
    """Each plan's least time of several, in turn: what else the machine does only adds to it. Some rounds of a plan
    follow one another, and the first does not count: a round after one of another plan finds the caches of the
    processor cold, which adds the most to the shortest. None takes longer than one with as many nodes and as deep."""
    turns = [{plan: [seconds(plan, size) for _ in range(_IN_A_ROW)] for plan in plans} for _ in range(_TURNS)]
    least = {plan: min(time for turn in turns for time in turn[plan][1:]) for plan in plans}
    return [min(time for larger, time in least.items() if _holds(larger, plan)) for plan in plans]


def _holds(larger: TreePlan, plan: TreePlan) -> bool:
    return larger.tree.num_nodes >= plan.tree.num_nodes and larger.tree.max_depth >= plan.tree.max_depth
