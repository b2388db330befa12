"""evals.compare: the whole command on a tiny target, two drafters and two tasks; what is refused."""

import json
from pathlib import Path

import pytest

from eagle_train.distributed import World
from evals import compare
from evals.bench import comparison, session
from evals.bench.comparison import ASSISTED
from evals.bench.comparison_report import title
from evals.bench.sweep import LOOKUP, TRANSFORMERS
from tests.support.command_line import call
from tests.support.eval_inputs import make_home, write_rows

OWN = str(Path(__file__).parents[2] / "examples" / "own_drafter.yaml")
ASSISTING = """
from eagle_train.inference import TextDrafter
from eagle_train.models.loading import TargetConfig, load_target

class Silent(TextDrafter):
    nbytes = 123

    def __init__(self, target, draft, path):
        self.model = load_target(TargetConfig(path), "cpu")

    def draft(self, text, most):
        return []
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = make_home(tmp_path_factory.mktemp("compare"))
    rows = [{"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():", "entry_point": "f"} for i in range(4)]
    write_rows(home / "human_eval.jsonl", rows)
    (home / "assisting.py").write_text(ASSISTING)
    (home / "assisting.yaml").write_text(f"_target_: assisting.Silent\npath: {home}/target\n")
    return home


def arguments(home: Path, out: Path, *more: str) -> list[str]:
    drafters = f"drafters={{eagle: {{draft: {home}/draft}}, own: {{drafter: {OWN}, tree: d2_bf2, least: 1}}}}"
    tasks = f"tasks=[{home}/questions.jsonl,{home}/human_eval.jsonl]"
    given = [f"target.path={home}/target", drafters, tasks, "max_tokens=12", f"out={out}", "device=cpu"]
    return [*(each for each in given if each.partition("=")[0] not in {one.partition("=")[0] for one in more}), *more]


@pytest.mark.usefixtures("noisy")
def test_the_whole_command(home, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(compare.main, *arguments(home, out, "batch_sizes=[1,2]", "repeats=9", "threads=1")) == 0
    found = json.loads((out / "results.json").read_text())
    assert {"config", "provenance"} <= set(found)
    engines = ["plain", "eagle", "own"]
    names = {1: [*engines, TRANSFORMERS, LOOKUP], 2: [*engines, TRANSFORMERS]}
    rows = {(row["batch_size"], row["task"], row["decoding"]): row for row in found["rows"]}
    tasks = ("questions", "human_eval")
    assert [*rows] == [(size, task, name) for size in (1, 2) for task in tasks for name in names[size]]
    # No question is asked twice: 3 of two turns, of which batches of 2 take two, and 4 of one.
    assert [rows[size, task, "own"]["answers"] for size in (1, 2) for task in tasks] == [6, 4, 4, 4]
    assert all(row["equal_answers"] == row["answers"] for row in found["rows"])
    for row in found["rows"]:
        drafts = row["decoding"] in ("eagle", "own")
        assert (row["memory"] is not None) == drafts == ("made_s" in row)
        assert (row["tpc"] == 1) == (row["decoding"] in ("plain", TRANSFORMERS))
        assert row["speedup"] == pytest.approx(rows[row["batch_size"], row["task"], "plain"]["ttit_s"] / row["ttit_s"])
    eagle, own = (rows[1, "questions", name] for name in ("eagle", "own"))
    assert len(eagle["acceptance_per_depth"]) == 3
    assert [row["to"] for row in eagle["by_context"]] == [64, 128]
    assert all("tpc_interval" in each and "speedup_interval" in each for each in eagle["by_category"])
    assert eagle["expected"]["tpc"] > 1
    assert 0 < eagle["drafting_share"] < 1
    weights = (home / "draft" / "model.safetensors").stat().st_size
    assert abs(eagle["memory"]["weight_bytes"] - weights) < 0.2 * weights
    assert own["memory"]["weight_bytes"] == own["memory"]["kv_bytes"] == 0 < own["memory"]["host_bytes"]
    assert eagle["memory"]["kv_bytes"] % eagle["memory"]["kv_bytes_per_token"] == 0
    assert [each["training"] for each in found["drafters"]] == [{"tokens": 12345}, None]
    assert [each["licence"] for each in found["tasks"]] == ["not stated", "MIT"]
    assert (found["cells"], found["left_out"]) == ({"measured": 4, "of": 4}, [])

    report, printed = (out / "report.md").read_text(), capsys.readouterr().out
    assert title(found) in report.splitlines()[0]
    for name in ("eagle", "own"):  # measured and expected, of each task
        assert [report.count(f"| {name} | {size} |") for size in (1, 2)] == [4, 4]
    assert "| eagle | `make_eagle` | chain3 |" in report
    assert "trained: tokens 12,345" in report
    assert [report.count(f"{name}, by context:") for name in ("eagle", "own")] == [2, 2]
    assert "HumanEval, 4 questions; licence: MIT." in report
    assert "so far" not in report
    assert f"written to {out}: report.md, results.json, pareto.png" in printed
    assert (out / "pareto.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("noisy")
def test_a_task_may_be_a_suite(home, tmp_path):
    task = f"tasks={{code: {{suite: humaneval, path: {home}/human_eval.jsonl}}}}"
    assert call(compare.main, *arguments(home, tmp_path, task, "max_tokens=4", "repeats=1")) == 0
    (task,) = json.loads((tmp_path / "results.json").read_text())["tasks"]
    assert (task["name"], task["format"], task["questions"]) == ("code", "HumanEval", 4)
    assert "Suite HumanEval (164 questions published); read from " in (tmp_path / "report.md").read_text()


def test_a_speed_up_beyond_tokens_per_call_is_an_error_at_single_prompts(home, tmp_path, capsys, monkeypatch):
    """Of that drafter alone: the others' rows are written. By the first rank's times, whatever this one's are."""

    def agreed(world, row):
        return {**row, "speedup": 99.0 if row["decoding"] == "eagle" else 1.0, "speedup_interval": None}

    monkeypatch.setattr(World, "agreed", agreed)
    given = ["batch_sizes=[1,2]", "repeats=1", "temperature=0.7", f"tasks=[{home}/human_eval.jsonl]"]
    assert call(compare.main, *arguments(home, tmp_path, *given)) == 2
    err = capsys.readouterr().err
    assert "error: human_eval, eagle: speed-up 99.000 exceeds " in err
    found = json.loads((tmp_path / "results.json").read_text())
    ours = [(row["batch_size"], row["decoding"]) for row in found["rows"] if row["memory"]]
    assert ours == [(1, "own"), (2, "eagle"), (2, "own")]
    assert len(found["left_out"]) == 1
    left_out = (tmp_path / "report.md").read_text().partition("## Left out\n\n")[2]
    assert "eagle: speed-up 99" in left_out.splitlines()[0]
    same = {row["decoding"]: row["equal_answers"] for row in found["rows"] if row["batch_size"] == 2}
    assert same == {"plain": 2, "eagle": 2, "own": 2, TRANSFORMERS: None}


@pytest.mark.usefixtures("noisy")
def test_a_drafters_model_assists_transformers(home, tmp_path, monkeypatch):
    """And what is asked before anything is measured is asked in no measurement."""
    warmed, prompts, real, measure = [], [], comparison.backwards, comparison.take_turns
    monkeypatch.setattr(comparison, "backwards", lambda batch: warmed.extend(real(batch)) or real(batch))

    def watched(everybody, batches, *rest):
        prompts.extend(each.prompt for batch in batches for each in batch)
        return measure(everybody, batches, *rest)

    monkeypatch.setattr(comparison, "take_turns", watched)
    given = [f"drafters={{silent: {{drafter: {home}/assisting.yaml}}}}", f"tasks=[{home}/human_eval.jsonl]"]
    assert call(compare.main, *arguments(home, tmp_path, *given, "repeats=1", "ignore_eos=true")) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    rows = {row["decoding"]: row for row in found["rows"]}
    assert [*rows] == ["plain", "silent", TRANSFORMERS, LOOKUP, ASSISTED]
    assert rows[ASSISTED]["tpc"] > 3  # the assistant is the target itself
    assert rows[ASSISTED]["equal_answers"] == rows[ASSISTED]["answers"] == 1
    assert (rows["silent"]["tpc"], rows["silent"]["expected"]) == (1.0, None)
    assert rows["silent"]["memory"]["host_bytes"] == 123
    assert prompts
    assert warmed
    assert not [each for each in warmed if each.prompt in prompts]


@pytest.mark.usefixtures("noisy")
def test_where_the_host_runs_ahead_stages_are_of_other_rounds(home, tmp_path, monkeypatch):
    """Those in which each stage is waited for, which also tell what no stage takes."""
    monkeypatch.setattr(comparison, "runs_ahead", lambda device: True)
    given = [f"drafters={{eagle: {{draft: {home}/draft}}}}", f"tasks={home}/human_eval.jsonl", "repeats=1"]
    assert call(compare.main, *arguments(home, tmp_path, *given)) == 0
    rows = {row["decoding"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    stages = rows["eagle"]["stage_ms_per_round"]
    assert rows["eagle"]["drafting_share"] == pytest.approx(stages["drafting"] / sum(stages.values()))
    assert "rest" in stages
    assert "drafting" not in rows["plain"]["stage_ms_per_round"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["drafters=[bigram]"], "drafters.bigram: no drafter bigram; there are draft_model, eagle, "),
        (["drafters=[]"], "drafters is empty"),
        (["drafters={ngram: {draft: nowhere}}"], "draft=nowhere: no config.json"),
        (
            ["drafters={own: {_target_: examples.own_drafter.LastPlace}}"],
            "so it must take them by name; it takes least",
        ),
        (["tasks=[nowhere.jsonl]"], "tasks=nowhere.jsonl: no such file"),
        (["tasks=[]"], "tasks=[]: must be a file or a suite, a list of these, or a mapping of names to them"),
        (["batch_sizes=[0]"], "batch_sizes=[0]: must be numbers from 1 on"),
        (["repeats=0"], "repeats=0: must be at least 1"),
        (["too_long=skip"], "too_long=skip: must be refuse or leave_out"),
        (["prompt_lookup=0"], "prompt_lookup=0: must be at least 1"),
        (
            ["repetition_penalty=1.2"],
            "repetition_penalty=1.2: transformers.generate, which is compared, does not do the same; leave it out",
        ),
        (["max_tokens=1"], "max_tokens=1: must be at least 2"),
        (["drafters={ngram: {tree: chain_9}}"], "tree is 'chain_9'; known trees are"),
        (["tree=chain_9"], "tree=chain_9: must be one of "),
        (["engine.max_batch_size=4"], "engine.max_batch_size=4: follows from the batch size here; leave it out"),
        (["draft=d"], "draft=d: no such key; did you mean drafters?"),
        (["questions=q.jsonl"], "questions=q.jsonl: no such key"),
    ],
)
def test_mistakes_are_one_line(home, tmp_path, capsys, monkeypatch, overrides, message):
    """Before a target is loaded."""
    monkeypatch.setattr(session, "load_target", None)
    assert call(compare.main, *arguments(home, tmp_path / "out", *overrides)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "out" / "results.json").exists()


def test_a_prompt_that_does_not_fit_is_refused_before_anything_is_answered(home, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(comparison, "take_turns", None)
    write_rows(tmp_path / "long.jsonl", [{"prompt": "a" * 300}])
    assert call(compare.main, *arguments(home, tmp_path / "out", f"tasks=[{tmp_path}/long.jsonl]")) == 2
    assert "error: question 1, turn 1: the prompt takes 306 tokens; " in capsys.readouterr().err
    given = [f"tasks=[{tmp_path}/long.jsonl]", "too_long=leave_out"]
    assert call(compare.main, *arguments(home, tmp_path / "out", *given)) == 2
    assert "error: task long: no question fits the context of " in capsys.readouterr().err


@pytest.mark.usefixtures("noisy")
def test_what_is_too_long_is_left_out_and_counted(home, tmp_path):
    """A context of 256: 244 tokens and 12 of an answer just fit; of two turns, the first answer counts twice."""
    rows = [{"prompt": "a" * size} for size in (238, 239)] + [{"turns": ["a", "b" * 190]}, {"turns": ["a", "b" * 208]}]
    write_rows(tmp_path / "long.jsonl", rows)
    given = [f"tasks=[{tmp_path}/long.jsonl]", "too_long=leave_out", "drafters=[ngram]", "repeats=null"]
    assert call(compare.main, *arguments(home, tmp_path / "out", *given)) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(each["questions"], each["too_long"]) for each in found["tasks"]] == [(2, 2)]
    assert found["rows"][0]["answers"] == 3
    assert "2 questions, 2 more too long; licence" in (tmp_path / "out" / "report.md").read_text()
