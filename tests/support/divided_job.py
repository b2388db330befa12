"""What test_divided_evaluations.py starts on several ranks: commands one after another, in one job."""

import importlib
from unittest.mock import Mock, patch

from eagle_train import distributed
from eagle_train.models import loading
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
            call_all([each])
            assert check.called, each
    distributed.leave()


def call_all(commands: list[tuple[str, list[str]]]) -> None:
    """`commands`: modules whose `main` is called, and its arguments."""
    with patch.object(statistics, "check_timing", lambda results: None):  # tests share the machine
        for module, arguments in commands:
            assert call(importlib.import_module(module).main, *arguments) == 0, (module, arguments)
