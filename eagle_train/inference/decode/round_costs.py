"""What a round takes, by its plan and batch size: measured at the start, and corrected by every round. DESIGN 3.5.

Knows nothing of requests or acceptance.
"""

from collections.abc import Callable

from eagle_train.inference.drafters.drafter import TreePlan

_SCALE_STEP, _OWN_STEP = 0.05, 0.1  # of what a round is off, by which a factor follows
_SETTLING = 8  # rounds after a change of plan: what is off then is the new plan's own; and as many before it tell how
# much all are off, since what was known of another batch size is old
_FIRST = 16  # rounds of a batch size that tell the factor of all plans, and no plan's own
_OUTLIER = 1.2  # times what is expected, or over it: something else took the time
_TURNS, _IN_A_ROW = 2, 3


class RoundCosts:
    """Seconds of rounds.

    At the start all plans are timed on an empty cache. What rounds take later differs, with the contexts and with what
    else the machine does: by one factor for all plans of a batch size, which changes slowly, and a factor of its own
    for each plan, which is seen when plans change.
    """

    def __init__(self, plans: list[TreePlan], sizes: list[int], seconds: Callable[[TreePlan, int], float]):
        """`seconds`: runs a round of a plan and a batch size, and times it."""
        self._sizes = sizes
        self._base = {(plan, size): time for size in sizes for plan, time in _timed(plans, size, seconds).items()}
        self._seen = dict.fromkeys(self._base, 0)
        self._scale = dict.fromkeys(sizes, 0.0)  # of all plans; 0: nothing was observed
        self._rounds = dict.fromkeys(sizes, 0)
        self._own = dict.fromkeys(self._base, 1.0)
        self._last: tuple[TreePlan, int] | None = None
        self._since_plan = self._since_size = 0  # rounds since a plan took another one's place, and the batch size's

    def seconds(self, plan: TreePlan, rows: int) -> float:
        """What a round is expected to take."""
        size = self._size(rows)
        return self._between(plan, rows) * (self._scale[size] or self._nearest_scale(size)) * self._own[plan, size]

    def seen(self, plan: TreePlan, rows: int) -> int:
        """How many rounds have told what the plan's own factor is."""
        return self._seen[plan, self._size(rows)]

    def observe(self, plan: TreePlan, rows: int, seconds: float) -> None:
        """A round took so long."""
        size = self._size(rows)
        ratio = seconds / (self._between(plan, rows) * self._own[plan, size])
        before, self._last = self._last, (plan, size)
        if before is None or before[1] != size:
            self._since_plan, self._since_size = _SETTLING, 0
        elif before[0] is not plan and self._since_size > _SETTLING:
            self._since_plan = 0
        self._since_plan, self._since_size = self._since_plan + 1, self._since_size + 1
        self._rounds[size] += 1
        if self._scale[size] == 0:
            self._scale[size] = ratio
            return
        off = max(1 / _OUTLIER, min(_OUTLIER, ratio / self._scale[size]))
        if self._rounds[size] <= _FIRST:  # the first round may be slow: it says nothing of one plan beside another
            self._scale[size] *= off ** (1 / self._rounds[size])
            return
        if self._since_plan > _SETTLING:
            self._scale[size] *= off ** max(_SCALE_STEP, 1 / (1 + self._since_size))
            return
        self._seen[plan, size] += 1
        self._own[plan, size] *= off ** max(_OWN_STEP, 1 / (1 + self._seen[plan, size]))

    def _size(self, rows: int) -> int:
        """The measured batch size that is nearest."""
        return min(self._sizes, key=lambda size: abs(size - rows))

    def _nearest_scale(self, size: int) -> float:
        known = [other for other in self._sizes if self._scale[other] > 0]
        return self._scale[min(known, key=lambda other: abs(other - size))] if known else 1.0

    def _between(self, plan: TreePlan, rows: int) -> float:
        """Seconds at the start, interpolated between the measured batch sizes."""
        below = max((size for size in self._sizes if size <= rows), default=self._sizes[0])
        above = min((size for size in self._sizes if size >= rows), default=self._sizes[-1])
        low, high = self._base[plan, below], self._base[plan, above]
        return low if above == below else low + (high - low) * (rows - below) / (above - below)


def _timed(plans: list[TreePlan], size: int, seconds: Callable[[TreePlan, int], float]) -> dict[TreePlan, float]:
    """Each plan's least time of several, in turn: what else the machine does only adds to it. Some rounds of a plan
    follow one another, and the first does not count: a round after one of another plan finds the caches of the
    processor cold, which adds the most to the shortest."""
    turns = [{plan: [seconds(plan, size) for _ in range(_IN_A_ROW)] for plan in plans} for _ in range(_TURNS)]
    return {plan: min(time for turn in turns for time in turn[plan][1:]) for plan in plans}
