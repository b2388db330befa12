"""An evaluation as a command: one process, or the ranks that torchrun starts, which hold the target together.

Every rank does the same work on its part of the target; the first alone writes results and prints them. Knows nothing
of what is measured.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from omegaconf import DictConfig

from eagle_train import distributed
from eagle_train.cli import command
from eagle_train.errors import within
from eagle_train.results import provenance

Task = Callable[[DictConfig], None]
_RUNNING: ContextVar[str | None] = ContextVar("running", default=None)


def origin(name: str | None = None) -> dict[str, Any]:
    """What every result says of itself: which evaluation made it, when (UTC, ISO 8601), and on what.

    `name`: of an evaluation that is no command of conf/commands; None for the command that runs.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"evaluation": name or _RUNNING.get(), "date": now, "provenance": provenance()}


def evaluation(name: str) -> Callable[[Task], Callable[[], None]]:
    """Makes `task(values)` the command of conf/commands/NAME.yaml, on any number of ranks (`Session.world`)."""

    def decorate(task: Task) -> Callable[[], None]:
        @command(name)
        @functools.wraps(task)
        def main(values: DictConfig) -> None:
            _RUNNING.set(name)
            distributed.run(lambda: _job(task, values))

        return main

    return decorate


def evaluation_alone(name: str) -> Callable[[Task], Callable[[], None]]:
    """The same for a task that has work for one process. Raises UserError where a launcher started several."""

    def decorate(task: Task) -> Callable[[], None]:
        @command(name)
        @functools.wraps(task)
        def main(values: DictConfig) -> None:
            distributed.check_alone(f"evals.{name}")
            _RUNNING.set(name)
            task(values)

        return main

    return decorate


@within("engine")
def _job(task: Task, values: DictConfig) -> int:
    """One rank's part; returns its exit status."""
    task(values)
    return 0
