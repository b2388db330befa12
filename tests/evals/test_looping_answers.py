"""Evaluations of a target that repeats itself say so, in the terminal and in the report."""

import importlib
import json
from pathlib import Path

import pytest

from evals.bench.report import asked_again, loops, write_report
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home

ANSWERED = {
    "mt_bench": [],
    "quantisation": [],
    "latency": ["repeats=1", "transformers=false"],
    "tune_trees": ["batch_sizes=[1]", "depth=1", "children=2", "nodes=[2]", "full=[]", "rounds=1"],
    "switches": ["switches=[speculation]", "tree=chain3", "batch_sizes=[1]", "repeats=1"],
    "layer_skip": ["depth=1"],
    "compare": ["drafters=[ngram]", "repeats=1"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("looping"), width=128)


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("command", ANSWERED)
def test_it_is_said(home, tmp_path, capsys, monkeypatch, command):
    monkeypatch.setattr("evals.bench.statistics.ends_in_loop", lambda tokens: True)
    given = arguments(home, f"out={tmp_path}/out", "device=cpu", *ANSWERED[command])
    if command in ("compare", "layer_skip"):
        given = [each for each in given if not each.startswith(("draft.path", "questions"))]
        given.append(f"{'tasks' if command == 'compare' else 'questions'}={home}/questions.jsonl")
    assert call(importlib.import_module(f"evals.{command}").main, *given) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning: ")]
    assert said.startswith("Warning: 100.0 % of the answers end in a loop, ")
    report = tmp_path / "out" / "report.md"
    assert not report.exists() or report.read_text().splitlines()[2] == said
    assert call(importlib.import_module("evals.report").main, f"results=[{tmp_path}/out]", f"out={tmp_path}/page") == 0
    assert said in (tmp_path / "page" / "report.md").read_text()


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"looping_answers": 0.1}, ""),
        ({"looping_answers": 0.11}, "Warning: 11.0 % of the answers end in a loop, "),
        ({"rows": [{"looping_answers": 0.5}, {"looping_answers": 0.5}]}, "Warning: 50.0 % of the answers "),
        ({"rows": [{"looping_answers": 0.0}, {"looping_answers": 0.5}]}, "Warning: up to 50.0 % of the answers "),
        ({"rows": [{"tpc": 1.0}]}, ""),
    ],
)
def test_a_few_loops_are_no_warning(tmp_path, found, said):
    assert "".join(loops(found)).startswith(said)
    assert len(loops(found)) == bool(said)
    write_report(tmp_path, found, "# A title\n\nWhat was asked.\n")
    assert (tmp_path / "report.md").read_text() == "\n\n".join(["# A title", *loops(found), "What was asked.\n"])
    assert json.loads((tmp_path / "results.json").read_text()) == found


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"distinct_prompts": 8, "answers": 8}, {"answers": 8}], ""),
        (
            [{"distinct_prompts": 8, "answers": 9}, {"distinct_prompts": 3, "answers": 6}],
            "6 answers are to 3 different",
        ),
        ([{"distinct_prompts": 3, "on_prompts": 12}], "12 answers are to 3 different"),
    ],
)
def test_prompts_that_were_asked_again_are_a_caution(rows, said):
    told = "".join(asked_again({"rows": rows}))
    assert told.startswith("Caution: prompts were asked more than once, " if said else "")
    assert said in told
    assert bool(told) == bool(said)
