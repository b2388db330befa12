"""What test_divided_evaluations.py starts on several ranks: commands one after another, in one job."""

import importlib
from datetime import datetime
from types import SimpleNamespace
from unittest.mock import Mock, patch

from eagle_train import distributed, export
from eagle_train.distributed import ALONE, World
from eagle_train.inference.requests import requests
from eagle_train.models import loading
from eagle_train.regeneration import run as regeneration
from evals.bench import statistics
from tests.support.command_line import call


def main(commands: list[tuple[str, list[str]]]) -> None:
    """What a rank does: all commands in the job's one process group, each with a target that the ranks divide."""
    world, check = distributed.start("cpu", shard_size=None), Mock(wraps=loading.check_divided)
    with (
        patch.multiple(distributed, start=lambda *_, **__: world, run=lambda job: job()),
        patch.object(loading, "check_divided", check),  # which whole targets do not go through
    ):
        for each in commands:
            check.reset_mock()
            call_all([each], world)
            assert check.called, each
    distributed.leave()


def call_all(commands: list[tuple[str, list[str]]], world: World = ALONE) -> None:
    """`commands`: modules whose `main` is called, and its arguments. Each rank lives in a year of its own."""
    year = 2026 + world.rank

    def check_same(found: dict) -> None:
        """In place of the times themselves, for tests share the machine."""
        assert len(set(world.exchange(found["speedup"]))) == 1, "ranks judge by other times"

    with (
        patch.object(statistics, "check_timing", check_same),
        patch.object(requests, "datetime", SimpleNamespace(now=lambda: datetime(year, 7, 31))),
        patch.object(export, "today", lambda: f"{year}-07-31"),
        patch.object(regeneration, "today", lambda: f"{year}-07-31"),
    ):
        for module, arguments in commands:
            assert call(importlib.import_module(module).main, *arguments) == 0, (module, arguments)
