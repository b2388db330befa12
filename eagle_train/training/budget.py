"""How long a run is: so many steps, or so many minutes of training, and how much of that is used.

All that follows the course of a run (the learning rate, weights of losses, the last step) follows the share that is
used, which is the same on every rank. Knows nothing of models, data or ranks.
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field

RECENT = 9  # steps whose median duration is taken for the next one's


@dataclass
class Budget:
    """One of `steps` and `minutes`, the other None.

    `used`: the share before the step under way, from 0 to below 1. `is_last`: whether the run ends with this step; of
    minutes it is the one whose end is nearest to the budget's. `before`: seconds that earlier processes of a resumed
    run have used; `finished`: whether they made their last step.
    """

    steps: int | None = None
    minutes: float | None = None
    used: float = 0.0
    is_last: bool = False
    before: float = 0.0
    finished: bool = False
    started: float | None = None
    begins: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT + 1))

    def start(self) -> None:
        """Training begins here, or goes on."""
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Of training so far, by this process's clock; of minutes never more than there are, all in the last step."""
        spent = self.before + (0.0 if self.started is None else time.monotonic() - self.started)
        if self.minutes is None:
            return spent
        return 60 * self.minutes if self.is_last else min(spent, 60 * self.minutes)

    def is_over(self, step: int) -> bool:
        """Whether a run that has made `step` steps has nothing more to do."""
        return step >= self.steps if self.minutes is None else self.finished and self.before >= 60 * self.minutes

    def drop(self) -> None:
        """The step under way is not made."""
        self.is_last = False

    def begin(self, step: int, seconds: float) -> None:
        """The step after `step` others begins, at a time that all ranks agree on."""
        if self.minutes is None:
            self.used, self.is_last = step / self.steps, step + 1 >= self.steps
            return
        self.begins.append(seconds)
        recent = [later - earlier for earlier, later in zip(self.begins, list(self.begins)[1:], strict=False)]
        self.used = min(1.0, seconds / (60 * self.minutes))
        usual = statistics.median(recent) if recent else 0.0
        self.is_last = seconds + 1.5 * usual >= 60 * self.minutes

    def course(self, step: int) -> float:
        """How far the run is in its step number `step`, from 0 in the first to 1 in the last."""
        return self.used if self.minutes is not None else (step - 1) / max(1, self.steps - 1)

    def done(self, step: int) -> str:
        """For messages: how much is done after `step` steps."""
        if self.minutes is None:
            return f"{step} of {self.steps} steps"
        return f"{step} steps and {self.seconds / 60:.1f} of {self.minutes:g} minutes"

    def __str__(self) -> str:
        return f"{self.steps} steps" if self.minutes is None else f"{self.minutes:g} minutes"
