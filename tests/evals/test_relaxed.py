"""Relaxed acceptance in evaluations: what is measured with it says in every place that it is lossy."""

import importlib
import json
from pathlib import Path

import pytest

from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home

SAID = "LOSSY: relaxed acceptance (top-k 300, delta 1)"
ROWS = {"mt_bench": [], "latency": ["chain3"], "compare": ["eagle", "own"]}  # those that draft


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("relaxed"))


def given(home: Path, command: str, out: Path) -> list[str]:
    if command != "compare":
        return [*arguments(home), f"out={out}", "device=cpu", *(["repeats=1"] if command == "latency" else [])]
    own = Path(__file__).parents[2] / "examples" / "own_drafter.yaml"
    drafters = f"drafters={{eagle: {{draft: {home}/draft}}, own: {{drafter: {own}, least: 1}}}}"
    tasks = f"tasks={home}/questions.jsonl"
    return [f"target.path={home}/target", drafters, tasks, "max_tokens=12", f"out={out}", "device=cpu", "repeats=1"]


def run(home: Path, command: str, out: Path, *more: str) -> tuple[dict, str]:
    main = importlib.import_module(f"evals.{command}").main
    assert call(main, *given(home, command, out), *more) == 0
    return json.loads((out / "results.json").read_text()), (out / "report.md").read_text()


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("command", ROWS)
def test_a_lossy_report_says_so(home, tmp_path, capsys, command):
    exact, exact_report = run(home, command, tmp_path / "exact")
    assert exact["lossy"] is False
    assert "LOSSY" not in exact_report + capsys.readouterr().out
    found, report = run(home, command, tmp_path / "lossy", "relaxed_topk=300", "relaxed_delta=1.0")
    assert found["lossy"] is True
    assert report.startswith("# LOSSY: ")
    assert SAID in report
    assert SAID in capsys.readouterr().out
    rows = found.get("rows", [])
    assert [row["decoding"] for row in rows if row["lossy"]] == ROWS[command]
    assert all(f"| {name} (LOSSY) |" in report for name in ROWS[command])
    drafting = [found] if command == "mt_bench" else [row for row in rows if row["decoding"] in ("chain3", "eagle")]
    plain = [row for row in rows if row["decoding"] == "plain"]
    assert [row["acceptance_per_depth"] for row in drafting] == [[1.0, 1.0, 1.0]]
    equal = [row.get("differing_answers") or row["answers"] - row["equal_answers"] for row in drafting]
    assert equal[0] > 0, "drafts are accepted that the target would not have chosen"
    assert all(row["tpc"] == 1 for row in plain)


@pytest.mark.usefixtures("noisy")
def test_what_is_served_is_not_as_trained(home, tmp_path):
    """A draft is not blamed for what was accepted though the target had chosen otherwise."""
    found, report = run(home, "mt_bench", tmp_path, "relaxed_topk=300", "relaxed_delta=1.0")
    assert found["train_serve_check"]["depth_1_as_trained"] is None
    assert "They disagree" not in report


@pytest.mark.parametrize("command", ROWS)
def test_mistakes_are_one_line(home, tmp_path, capsys, command):
    main = importlib.import_module(f"evals.{command}").main
    assert call(main, *given(home, command, tmp_path), "relaxed_delta=0.5") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: relaxed_delta=0.5: needs relaxed_topk above 0"
    assert call(main, *given(home, command, tmp_path), "relaxed_topk=5", "temperature=1") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: relaxed_topk=5: is for temperature 0, not 1.0"


def test_simulated_acceptance_is_not_relaxed(tmp_path, capsys):
    main = importlib.import_module("evals.latency").main
    shapes = ["shapes=tiny", "acceptance=[0.8,0.6,0.3]", "context_lengths=[12]", f"out={tmp_path}", "device=cpu"]
    assert call(main, *shapes, "relaxed_topk=5") == 2
    assert "error: relaxed_topk=5: leave it out with shapes" in capsys.readouterr().err
