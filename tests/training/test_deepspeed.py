"""What another process builds of DeepSpeed's C++ is waited for, and not for ever.

That DeepSpeed trains as other backends do is in tests/distributed/test_ranks.py.
"""

import os
import time
from pathlib import Path

import pytest

from eagle_train.training.deepspeed import _await_build


@pytest.fixture(params=["", "py311_cpu"], ids=["in a place that is given", "in torch's own"])
def lock(request, tmp_path, monkeypatch) -> Path:
    """Of a process that builds it, in the directory that torch builds in."""
    if request.param:
        monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        monkeypatch.setattr("eagle_train.training.deepspeed.get_default_build_root", lambda: str(tmp_path))
    else:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    made = tmp_path / request.param / "deepspeed_shm_comm" / "lock"
    made.parent.mkdir(parents=True)
    made.touch()
    return made


def test_a_build_is_waited_for(lock, monkeypatch, caplog):
    """Told once, however long it takes."""
    slept = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds) or (len(slept) == 3 and lock.unlink()))
    with caplog.at_level("INFO"):
        _await_build()
    assert len(slept) == 3
    said = f"waiting for the process that builds {lock.parent}, 10 minutes at most"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_a_lock_that_a_killed_process_left_is_removed(lock, monkeypatch, caplog):
    long_ago, slept = time.time() - 601, []
    os.utime(lock, (long_ago, long_ago))
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds) or len(slept) < 3 or pytest.fail("waits"))
    _await_build()
    assert not lock.exists()
    said = f"removed {lock}: who made it was killed before it had built deepspeed_shm_comm"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_nothing_is_waited_for_where_nobody_builds(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits"))
    _await_build()
