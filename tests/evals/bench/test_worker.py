"""A worker's mistakes reach whoever gives it orders, at its start or in the middle."""

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
