"""What test_divided_evaluations.py starts on several ranks: commands one after another, in one job."""

import importlib
from unittest.mock import patch

from eagle_train import distributed
from evals.bench import statistics
from tests.support.command_line import call


def main(commands: list[tuple[str, list[str]]]) -> None:
    """What a rank does: all commands in the job's one process group."""
    world = distributed.start("cpu", shard_size=None)
    with (
        patch.object(distributed, "start", lambda *_, **__: world),
        patch.object(distributed, "run", lambda job: job()),
    ):
        call_all(commands)
    distributed.leave()


def call_all(commands: list[tuple[str, list[str]]]) -> None:
    """`commands`: modules whose `main` is called, and its arguments."""
    with patch.object(statistics, "check_timing", lambda results: None):  # tests share the machine
        for module, arguments in commands:
            assert call(importlib.import_module(module).main, *arguments) == 0, (module, arguments)
