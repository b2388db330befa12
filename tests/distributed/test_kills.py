"""A job on several ranks that is killed at random moments gives the metrics of one that was not.

KILLS=50 STEPS=450 pytest tests/distributed/test_kills.py    makes it a long one
"""

import os
import random
import sys

import pytest

from tests.support import processes
from tests.support.command_line import chats, metrics_without_times, write_jsonl
from tests.support.trainers import assert_same, make_trainer, run_training

KILLS, STEPS = int(os.environ.get("KILLS", 4)), int(os.environ.get("STEPS", 40))


@pytest.mark.ranks
@pytest.mark.slow
def test_killed_ranks_lose_nothing(tmp_path):
    for seed, (name, count) in enumerate({"train": 60, "heldout": 12}.items()):
        write_jsonl(tmp_path / f"{name}.jsonl", chats(count, seed))
    seed = os.environ.get("SEED") or str(random.randrange(10**6))
    job = [sys.executable, "-m", "tests.support.kill_job", tmp_path, tmp_path / "killed"]
    done = processes.run([*job, str(KILLS), str(STEPS), seed], env=processes.SETTINGS)
    told = f"SEED={seed}\n{done.stdout[-3000:]}{done.stderr[-6000:]}"
    assert done.returncode == 0, told
    assert f"KILLS {KILLS}\n" in done.stdout, told
    print(told)
    expected = run_training(
        make_trainer(tmp_path / "whole", tmp_path, steps=STEPS, rows=1, rows_per_step=6, save_every=1)
    )
    found = metrics_without_times(tmp_path / "killed")
    assert [row["step"] for row in found] == list(range(1, STEPS + 1)), told
    for one, other in zip(found, expected, strict=True):
        assert_same(one, {key: other[key] for key in one}, 1e-4)
