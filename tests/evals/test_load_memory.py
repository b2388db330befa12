"""evals/load_memory.py: ranks that divide a target hold their parts of it; one that loads all of it is detected."""

import json
import sys

import pytest

from eagle_train.errors import UserError
from evals import load_memory
from evals.bench import memory


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The command's exit status and its shares for these placements, on a target of 0.4 GB in fp32."""

    def run(*placements: str) -> tuple[int, dict[str, float]]:
        monkeypatch.setattr(load_memory, "PLACEMENTS", placements)
        monkeypatch.setattr(load_memory, "SIZES", load_memory.SIZES | {"hidden_size": 512, "intermediate_size": 2048})
        monkeypatch.setattr(load_memory, "LAYER", load_memory.LAYER // 4)  # many layers: some are gathered at a time
        given = ["gigabytes=0.2", "shards=3", f"out={tmp_path}/found.json"]
        monkeypatch.setattr(load_memory.sys, "argv", ["load_memory", *given])
        status = load_memory.main()
        return status, json.loads((tmp_path / "found.json").read_text())["peak_share"]

    return run


def test_help_is_the_files_docstring(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["load_memory", "--help"])
    with pytest.raises(SystemExit) as end:
        load_memory.main()
    assert not end.value.code
    assert "python -m evals.load_memory [gigabytes=1.5]" in capsys.readouterr().out


def test_a_rank_with_its_part_is_told_apart_from_one_with_all(measured):
    status, shares = measured("fsdp2", "replicated")
    assert status == 1  # for the second
    assert 0.45 < shares["fsdp2"] < 0.85
    assert shares["replicated"] > 0.95


def test_a_system_that_tells_no_memory_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    with pytest.raises(UserError, match=r"^VmHWM: this system does not tell it in .*; memory is measured on Linux$"):
        memory.peak_bytes()
