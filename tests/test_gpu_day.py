"""launch/gpu_day.sh: what its parts give to commands that nobody runs on a machine without a GPU."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from eagle_train.cli import compose, named_path
from eagle_train.settings import build
from evals.bench.study import StudyConfig

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
printf '%s\\037' "$@" >> "$CALLS"
echo >> "$CALLS"
"""


def calls_of(tmp_path: Path, *parts: str) -> list[list[str]]:
    """The arguments of each call of Python."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    given = {"PYTHON": str(python), "CALLS": str(calls), "OUT": str(tmp_path / "out")}
    ended = subprocess.run(["bash", "launch/gpu_day.sh", *parts], cwd=ROOT, env=os.environ | given, timeout=60)
    assert ended.returncode == 0
    return [line.split("\037")[:-1] for line in calls.read_text().splitlines()]


def test_every_part_gives_what_its_command_takes(tmp_path):
    composed = []
    for kind, what, *overrides in calls_of(tmp_path)[1:]:  # behind the look for a GPU
        if kind == "-c":
            (name,) = re.findall(r"import (\w+);", what)
        elif kind == "-m" and what.startswith("evals."):
            name = what.removeprefix("evals.")
        else:
            continue
        composed.append(name)
        values = compose(name, [each for override in overrides for each in named_path(override, name)])
        assert values.device == "cuda" or name == "export"
        if name == "experiments":
            assert build(StudyConfig, values, "").study.name == "kinds"
    assert {"ceilings", "train_throughput", "latency", "train", "export", "mt_bench"} < set(composed)
    assert {"switches", "compare", "experiments"} < set(composed)


def test_kernels_are_tested_where_they_run(tmp_path):
    """All that are for a GPU if there is one, without those that compile for one that need not be there."""
    _, given = calls_of(tmp_path, "kernels")
    files = {name for name in given if name.endswith(".py")}
    assert {f"tests/ops/test_{name}.py" for name in ("paged", "few_rows", "head_argmax", "fused_loss")} <= files
    assert given[given.index("-k") + 1] == "not hopper"


def test_parts_that_are_none_are_refused(tmp_path):
    with pytest.raises(AssertionError):
        calls_of(tmp_path, "nothing")
