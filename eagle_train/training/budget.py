"""The length of a run, in steps or in minutes of training, and how much of it is used.

Everything that changes in the course of a run (the learning rate, weights of losses, the last step) follows the share
that is used, which is the same on every rank. Knows nothing of models, data or ranks.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_RECENT = 9  # steps whose median duration predicts the next one's


@dataclass
class Budget:
    """One of `steps` and `minutes`; the other is None.

    `used`: the share used before the current step, from 0 to below 1. `is_last`: whether the run ends with the current
    step; of minutes, the last step is the one whose end is nearest to the budget's. `before`: seconds that were used
    when the clock was last started, by earlier processes of a resumed run too; `finished`: whether these made the last
    step.
    """

    steps: int | None = None
    minutes: float | None = None
    used: float = 0.0
    is_last: bool = False
    before: float = 0.0
    finished: bool = False
    _started: float | None = None
    _begins: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT + 1))

    def start(self) -> None:
        """Start the clock: training begins or continues here."""
        self._started = time.monotonic()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The clock stands meanwhile: what is done is no training."""
        self.before, self._started = self._spent, None
        yield
        self.start()

    @property
    def _spent(self) -> float:
        return self.before + (0.0 if self._started is None else time.monotonic() - self._started)

    @property
    def seconds(self) -> float:
        """Training time so far, by this process's clock. Of minutes never more than the budget, in the last step all
        of it.
        """
        if self.minutes is None:
            return self._spent
        return 60 * self.minutes if self.is_last else min(self._spent, 60 * self.minutes)

    @property
    def _total(self) -> int:
        """The steps of a run that has no minutes."""
        assert self.steps is not None
        return self.steps

    def is_over(self, step: int) -> bool:
        """Whether a run that has made `step` steps has nothing left to do."""
        if self.minutes is None:
            return step >= self._total
        return self.finished and self.before >= 60 * self.minutes

    def drop(self) -> None:
        """Take back `begin`: the current step is not made."""
        self.is_last = False

    def begin(self, step: int, seconds: float) -> None:
        """Begin the step after `step` others, at a time of training that is the same on all ranks."""
        if self.minutes is None:
            self.used, self.is_last = step / self._total, step + 1 >= self._total
            return
        self._begins.append(seconds)
        recent = [later - earlier for earlier, later in zip(self._begins, list(self._begins)[1:], strict=False)]
        self.used = min(1.0, seconds / (60 * self.minutes))
        usual = statistics.median(recent) if recent else 0.0
        self.is_last = seconds + 1.5 * usual >= 60 * self.minutes

    def progress_at(self, step: int) -> float:
        """The run's progress in step 1, 2, ...: 0 in the first, 1 in the last of so many steps; of minutes, `used`."""
        return self.used if self.minutes is not None else (step - 1) / max(1, self._total - 1)

    def done(self, step: int) -> str:
        """For messages: how much is done after `step` steps."""
        if self.minutes is None:
            return f"{step} of {self.steps} steps"
        return f"{step} steps and {self.seconds / 60:.1f} of {self.minutes:g} minutes"

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.minutes is None else f"{self.minutes:g} minutes"
