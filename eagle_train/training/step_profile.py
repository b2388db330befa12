"""A profile of some steps of a training run: its trace, its figures, and the plan's estimates beside them.

Knows nothing of what a step does. DESIGN section 3.10.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eagle_train.errors import check
from eagle_train.profiling import Profile, text
from eagle_train.results import provenance, write_json
from eagle_train.training.cost import measured
from eagle_train.training.cost.measured import StepPlan
from eagle_train.training.trainer import Trainer

STAGES = ("data", "target", "draft", "loss", "optimiser")  # the ranges of trainer.py and target_pass.py
WARM_UP, STEPS = 3, 3
NEEDED = WARM_UP + 2 * STEPS
_MICRO_BATCHES = 64  # that are profiled at most: with more, a trace would take gigabytes

_LOG = logging.getLogger(__name__)


def check_long_enough(profile: bool, steps: Any) -> None:
    """Raise UserError for a run of too few steps to be profiled. `steps`: `train.steps` as it was given."""
    long = f"{WARM_UP} steps that warm up, {STEPS} that are timed without a profiler and {STEPS} with it"
    check(
        not profile or not isinstance(steps, int) or steps >= NEEDED,
        f"train.steps={steps}: profile=true needs at least {NEEDED}, {long}",
    )


class StepProfile:
    """Profiles a run: `trainer.around_step = StepProfile(...)`, and `close` when the run is over.

    After `WARM_UP` steps come `STEPS` that are timed, and as many that are profiled, fewer where steps have many
    micro-batches. Then trace.json.gz and profile.json are in the run's directory, and a table is printed; steps go on.
    They learn what they would learn anyway.
    """

    def __init__(self, trainer: Trainer, plan: StepPlan):
        self._device, self._directory, self._plan = trainer.target.device.type, trainer.directory, plan
        self._side_by_side = trainer.lookahead.runs_beside
        self._steps = max(1, min(STEPS, _MICRO_BATCHES // trainer.lookahead.accumulation))
        self._profile = Profile(self._device)
        self._begun = 0  # steps
        self._profiled = 0
        self._started = self._undisturbed = 0.0
        self._is_done = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around a step."""
        if self._begun == WARM_UP:
            self._started = self._now()
        elif self._begun == WARM_UP + self._steps:
            self._undisturbed = (self._now() - self._started) / self._steps
            self._profile.start()
        self._begun += 1
        yield
        self._profiled += self._begun > WARM_UP + self._steps and not self._is_done
        if self._profiled == self._steps and not self._is_done:
            self._report()

    def close(self) -> None:
        """The run is over: report the steps that were profiled, if the run ended amid them."""
        if self._is_done:
            return
        if self._profiled:
            self._report()
        else:
            _LOG.warning("profile: the run ended before the steps to profile; it needs %d", NEEDED)

    def _report(self) -> None:
        """Write the trace and the figures, and print them."""
        self._is_done = True
        self._profile.stop()
        self._profile.write(self._directory / "trace.json.gz")
        found = self._profile.figures(STAGES, "step", self._profiled, self._undisturbed)
        rows = measured.beside(self._plan, found, self._profile.memory)
        about = {"most_bytes": self._profile.memory, "plan": rows, "provenance": provenance()}
        write_json(self._directory / "profile.json", {**found, **about})
        print(text(found, "profile", "step"))
        print(measured.text(rows, self._side_by_side))
        print(f"  written to {self._directory}: trace.json.gz, profile.json", flush=True)

    def _now(self) -> float:
        """Seconds on a clock, when the device has done all that it was given."""
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
