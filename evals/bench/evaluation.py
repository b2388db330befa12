"""An evaluation as a command: one process, or the ranks that torchrun starts, which hold the target together.

Every rank does the same work on its part of the target; the first alone writes results and prints them, into a place
that no other evaluation writes to meanwhile. Knows nothing of what is measured.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from eagle_train import distributed
from eagle_train.cli import command
from eagle_train.errors import within
from eagle_train.one_writer import beside, one_writer
from eagle_train.results import is_stream, provenance

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
            with _writing(values):
                task(values)

        return main

    return decorate


@within("engine")
def _job(task: Task, values: DictConfig) -> int:
    """One rank's part; returns its exit status."""
    with _writing(values):
        task(values)
    return 0


def _writing(values: DictConfig) -> AbstractContextManager[object]:
    """For as long as results are made: the first rank alone writes to `out`. Raises UserError there where another
    process does."""
    out, is_main = Path(str(values.out)), distributed.place()[0] == 0
    is_written = values.out and is_main and not values.get("plan") and not is_stream(out)
    return one_writer(out, beside(out)) if is_written else nullcontext()
