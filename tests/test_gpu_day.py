"""launch/gpu_day.sh: what its parts give to commands that nobody runs on a machine without a GPU."""

import os
import re
import subprocess
from pathlib import Path

from omegaconf import OmegaConf

from eagle_train.cli import compose, named_path
from eagle_train.settings import build
from evals import gpu_goals, loss_times
from evals.bench.study import StudyConfig

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
printf '%s\\037' "$@" >> "$CALLS"
echo >> "$CALLS"
"""
WRITES = """for each in "$@"; do
  case $each in out=*.json) echo {} > "${each#out=}" ;; esac
done
"""


def day(tmp_path: Path, *parts: str, writes: bool = False) -> tuple[int, list[list[str]], str]:
    """The exit status, the arguments of each call of Python, and what is said. `writes`: whether Python leaves the JSON
    that it is told to."""
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON + (WRITES if writes else ""))
    python.chmod(0o755)
    given = {"PYTHON": str(python), "CALLS": str(calls), "OUT": str(tmp_path / "out")}
    command = ["bash", "launch/gpu_day.sh", *parts]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | given, timeout=60, capture_output=True, text=True)
    made = [line.split("\037")[:-1] for line in calls.read_text().splitlines()]
    return ended.returncode, made, ended.stdout + ended.stderr


def test_every_part_gives_what_its_command_takes(tmp_path):
    composed, plain = [], {"loss_times": loss_times.Config, "gpu_goals": gpu_goals.Config}
    for kind, what, *overrides in day(tmp_path)[1][1:]:  # behind the look for a GPU
        if kind == "-c":
            (name,) = re.findall(r"import (\w+);", what)
        elif kind == "-m" and what.startswith("evals."):
            name = what.removeprefix("evals.")
        else:
            continue
        composed.append(name)
        if name in plain:
            build(plain[name], OmegaConf.from_dotlist(overrides), "")
            continue
        values = compose(name, [each for override in overrides for each in named_path(override, name)])
        assert values.device == "cuda" or name == "export"
        if name == "experiments":
            assert build(StudyConfig, values, "").study.name == "kinds"
    assert {"ceilings", "train_throughput", "latency", "train", "export", "mt_bench"} < set(composed)
    assert {"switches", "compare", "experiments", *plain} < set(composed)
    assert composed[-1] == "gpu_goals"


def test_kernels_are_tested_where_they_run(tmp_path):
    """All that are for a GPU if there is one, without those that compile for one that need not be there."""
    _, given, _ = day(tmp_path, "kernels")[1]
    files = {name for name in given if name.endswith(".py")}
    assert {f"tests/ops/test_{name}.py" for name in ("paged", "few_rows", "head_argmax", "fused_loss")} <= files
    assert given[given.index("-k") + 1] == "not hopper"


def test_gpu_tests_alone_are_imported(tmp_path):
    """Other files may import packages that a machine with a GPU lacks."""
    _, given, _ = day(tmp_path, "tests")[1]
    asked = {name for name in given if name.startswith("tests")}
    marked = re.compile(r"mark\Wgpu\b")
    wanted = {path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text())}
    assert asked == {str(path.relative_to(ROOT)) for path in wanted}
    assert {"tests/ops/test_few_rows.py", "tests/inference/test_every_device.py"} < asked
    assert given[given.index("-m", 2) + 1] == "gpu"


def test_parts_that_are_none_are_refused(tmp_path):
    status, _, said = day(tmp_path, "nothing")
    assert status == 2
    assert "error: nothing: must be one of ceilings tests" in said


def test_a_part_that_writes_no_result_has_failed(tmp_path):
    status, _, said = day(tmp_path, "loss", "run")
    assert status == 1
    assert f"status 0, but it wrote no {tmp_path}/out/loss.json" in said
    assert said.endswith("\nfailed: loss data run export answers goals\n")
    status, _, said = day(tmp_path, "loss", "step", writes=True)
    assert status == 0
    assert said.endswith("\nfailed: none\n")
    status, _, said = day(tmp_path, "loss")  # whose result is there, from before
    assert (status, said.splitlines()[-1]) == (1, "failed: loss goals")


def test_each_part_has_eight_minutes(tmp_path):
    said = day(tmp_path)[2]
    budgets = {name: int(seconds) for name, seconds in re.findall(r"^== (\w+) \(at most (\d+) s\)", said, re.M)}
    of_run = sum(budgets.pop(name) for name in ("data", "run", "export", "answers"))
    assert max(of_run, *budgets.values()) <= 480
    assert sum(budgets.values()) + of_run <= 80 * 60  # as docs/clusters.md says
    parts = re.search(r"PARTS=\((.*?)\)", (ROOT / "launch/gpu_day.sh").read_text(), re.S)[1].split()
    assert {*budgets, "run"} == {*parts, "goals"}


def test_contexts_go_from_1k_to_8k_and_the_copy_bound_is_of_the_measured_copy(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ceilings.json").write_text('{\n  "copy_gb_per_s": 3003.5,\n  "launch_us": 9.8\n}\n')
    seen = set()
    for each in day(tmp_path, "plain", "contexts")[1][1:-1]:
        values = compose("latency", each[2:])
        assert (values.cluster.memory_tb_s, values.batch_sizes) == (3.0035, [1])
        seen |= set(values.context_lengths)
    assert seen == {1024, 2048, 4096, 8192}
