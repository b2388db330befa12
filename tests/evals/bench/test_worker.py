"""A worker's mistakes, and its end, reach whoever gives it orders, at its start or in the middle."""

import os
import signal
from multiprocessing.connection import Connection

import pytest

from eagle_train.errors import UserError
from evals.bench.worker import Worker


def doubles(least: int, line: Connection) -> None:
    if least < 0:
        raise UserError(f"least={least}: must be 0 or more")
    while (order := line.recv()) is not None:
        if order < least:
            raise UserError(f"order={order}: must be at least {least}")
        line.send(2 * order)


@pytest.mark.parametrize("least", [-1, 3])
def test_a_mistake_is_raised_by_the_order(least):
    worker = Worker(doubles, least)
    if least > 0:
        assert worker.ask(4) == 8
    with pytest.raises(UserError, match=r"must be (0 or more|at least 3)"):
        worker.ask(2)
    worker.close()


def test_an_interrupt_of_all_processes_is_for_who_gives_the_orders():
    """Of one that has just been started, too: it would tell where its imports were."""
    worker = Worker(doubles, 0)
    os.kill(worker.process.pid, signal.SIGINT)
    assert worker.ask(4) == 8
    worker.close()


def dies(how: str, line: Connection) -> None:
    line.recv()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    ("how", "told"), [("killed", "status -9; its output is above; -9 says"), ("fails", "status 1;")]
)
def test_a_process_that_ended_is_told_of_in_one_line(how, told):
    worker = Worker(dies, how)
    for _ in range(2):
        with pytest.raises(UserError, match=told):
            worker.ask(1)
