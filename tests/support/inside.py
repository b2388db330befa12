"""The parts inside an engine, for tests of those parts: where they are is known here alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

from eagle_train.inference import Engine, Sequence
from eagle_train.inference.cache.block_pool import BlockPool
from eagle_train.inference.drafters.drafter import Drafter
from eagle_train.inference.requests.scheduler import Scheduler
from eagle_train.inference.runner import Runner


def scheduler_of(engine: Engine) -> Scheduler:
    return engine._scheduler


def runner_of(engine: Engine) -> Runner:
    return engine._runner


def drafter_of(engine: Engine) -> Drafter:
    drafter = engine._runner.drafters.only
    assert drafter is not None
    return drafter


def pool_of(engine: Engine) -> BlockPool:
    return engine._scheduler.pool


def active_in(engine: Engine) -> list[Sequence]:
    """The sequences that decode, row by row."""
    return engine._scheduler.active


def inside(engine: Engine) -> SimpleNamespace:
    """All other parts."""
    return SimpleNamespace(
        batch=engine._batch,
        memory=engine._memory,
        requests=engine._requests,
        prefiller=engine._prefiller,
        adaptive=engine._adaptive,
        in_flight=engine._in_flight,
        overlap=engine._overlap,
    )


@contextmanager
def results_withheld(engine: Engine) -> Iterator[list]:
    """Rounds whose results the host would read within are listed instead, and read at the end."""
    finish, withheld = engine._finish, []
    engine._finish = withheld.append
    try:
        yield withheld
    finally:
        engine._finish = finish
    for flight in withheld:
        finish(flight)


def add_as(engine: Engine, index: int, prompt: list[int], params: object) -> Sequence:
    """Queue a request with an index of the test's choice."""
    request = engine._requests.sequence(index, prompt, params)
    engine._queue([request])
    return request
