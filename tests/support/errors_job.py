"""What test_distributed.py starts on several ranks: work that fails on one of them."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from eagle_train import distributed
from eagle_train.distributed import CommonError, World
from eagle_train.errors import UserError, check


def main(part: str) -> None:
    """`part`: agree or alone."""
    distributed._ERROR_WAIT = timedelta(seconds=1)
    distributed.run({"agree": agree, "alone": alone}[part])


def agree() -> int:
    world = distributed.start("cpu")
    assert world.by_main(lambda: world.rank) == 0
    assert world.by_each(lambda: world.rank) == world.rank
    for work, failing in ((world.by_main, 0), (world.by_each, 0), (world.by_each, 1)):
        with pytest.raises(CommonError, match=f"^no room on {failing}$"):
            work(refused_on(world, failing))
    assert world.by_main(refused_on(world, 1)) is None  # which does no work
    return 0


def refused_on(world: World, rank: int) -> Callable[[], None]:
    return lambda: check(world.rank != rank, f"no room on {rank}", UserError)


def alone() -> int:
    world = distributed.start("cpu")
    if world.rank == 1:
        raise CommonError("row 9 is no chat")
    world.exchange(None)
    return 0
