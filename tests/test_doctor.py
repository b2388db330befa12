"""eagle-doctor as a command: what it prints and writes, its exit status, and users' mistakes."""

import json
import re
import shutil
from html import unescape

import pytest

from eagle_train import doctor
from eagle_train.cli import compose
from eagle_train.diagnosis import DoctorConfig
from eagle_train.diagnosis.causes import CAUSES, Finding, NotChecked, in_order
from eagle_train.diagnosis.report import report, summary
from eagle_train.diagnosis.run import Diagnosis
from eagle_train.one_writer import beside, one_writer
from eagle_train.settings import build
from evals import report as evals_report
from tests.support.command_line import call
from tests.support.doctor_models import PLACE
from tests.support.planted import edited, exported

SMALL = ["limit=8", "max_tokens=40", "device=cpu", f"data.path={PLACE}/questions.jsonl", f"target={PLACE}/target"]
SMALL += ["vllm.python=none"]  # whether or not one is here


def run(out, *arguments: str) -> int:
    return call(doctor.main, *SMALL, f"out={out}", *arguments)


def test_a_healthy_draft_ends_with_status_0(tmp_path, capsys):
    assert run(tmp_path / "out", f"draft={PLACE}/eagle3") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "healthy: nothing was found"
    assert "tokens per call (TPC; 99 % interval" in told[1]
    assert re.search(r"; contexts of up to \d+ tokens were asked\.$", told[1])
    assert told[2].startswith("1 + drafts accepted after every token: ")
    assert len(told) <= 25
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (found["healthy"], found["problems"]) == (True, [])
    assert told[1].startswith(f"{found['tpc']:.2f} ")
    assert found["tpc_interval"][0] <= found["tpc"] <= found["tpc_interval"][1]
    assert {"after_every_token", "config", "provenance", "changes", "acceptance_per_depth", "rounds"} <= found.keys()
    assert "${" not in json.dumps(found["config"])  # what names another key is its value
    assert (tmp_path / "out" / "report.md").read_text().startswith("# Healthy")


def test_a_second_doctor_of_one_place_is_refused(tmp_path, capsys):
    out = tmp_path / "out"
    with one_writer(out, beside(out)):
        assert run(out, f"draft={PLACE}/eagle3") == 2
    assert f"error: out={out}: process " in capsys.readouterr().err
    assert not out.exists()


def test_every_preset_of_data_is_taken():
    """That of the bundled data names the doctor's own prompts, the default, as its held-out data."""
    bundled = "outputs/stdlib_chat"
    paths = {"data=stdlib": f"{bundled}/train.jsonl", "data=gsm8k": "openai/gsm8k", "": f"{bundled}/heldout.jsonl"}
    for given, path in paths.items():
        values = compose("doctor", [*filter(None, [given]), "draft.path=nowhere"])
        config = build(DoctorConfig, values, "")
        assert (config.data.path, config.data.heldout) == (path, None)


def test_default_prompts_and_another_target_are_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "stdlib_chat").mkdir(parents=True)
    shutil.copy(PLACE / "questions.jsonl", default := "outputs/stdlib_chat/heldout.jsonl")
    assert call(doctor.main, f"target={PLACE}/target", f"out={tmp_path}/out", "draft=nowhere") == 2
    said = f"note: data.path={default}: questions for the bundled target; give data.path=FILE with your own"
    assert said in capsys.readouterr().err


def test_a_problem_ends_with_status_1_and_says_what_to_do(tmp_path, capsys):
    def with_theta(values: dict) -> None:
        values["rope_theta"] = values["rope_parameters"]["rope_theta"] = 20.0

    place = edited(exported(tmp_path / "draft", "eagle", "vllm"), with_theta)
    assert run(tmp_path / "out", f"draft={place}", f"trained={PLACE}/eagle") == 1
    told = capsys.readouterr().out
    assert told.startswith("1 problem\n")
    assert f"1. {CAUSES['rope'].title}" in told
    assert f"do: {CAUSES['rope'].remedy}" in told
    assert "As trained it has" in told
    assert len(told.splitlines()) <= 25
    (finding,) = json.loads((tmp_path / "out" / "results.json").read_text())["problems"]
    assert (finding["cause"], finding["remedy"]) == ("rope", CAUSES["rope"].remedy)
    assert finding["costs"] > 0.5
    assert CAUSES["rope"].remedy in (tmp_path / "out" / "report.md").read_text()
    assert call(evals_report.main, f"results=[{tmp_path}/out]", f"out={tmp_path}/page") == 0
    assert CAUSES["rope"].remedy in unescape((tmp_path / "page" / "report.html").read_text())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["draft=nowhere"], "draft=nowhere: no such directory; give one, or a hub id (OWNER/NAME)"),
        (["draft=nowhere", "target={place}/nowhere"], "draft=nowhere: no such directory"),  # told first
        (["draft={place}"], "doctor: no checkpoint there; give the directory of a training run"),
        (["draft={place}/eagle", "limit=1"], "limit=1: must be at least 2"),
        (["draft={place}/eagle", "max_tokens=1"], "max_tokens=1: must be at least 4"),
        (["draft={place}/eagle", "depth=0"], "depth=0: must be at least 1"),
        (["draft={place}/eagle", "serving_dtype=int8"], "serving_dtype=int8: must be null or one of bfloat16"),
        (
            ["draft={place}/eagle", "data=text", "data.path={place}/questions.jsonl"],
            "data.format=text: it has no prompts",
        ),
        (
            ["draft={place}/eagle", "data.path=null", "data.mix={{a: {{path: b.jsonl}}}}"],
            "data.mix: one data set is read at a time; give data.path",
        ),
        (["draft={place}/eagle", "target.cached=true"], "target=cached: has no layers to answer with"),
        (["draft={place}/eagle", "max_tokens=250"], "fewer than two rows hold a prompt of less than 6 tokens"),
        (["draft={place}/eagle", "trained=nowhere"], "trained=nowhere: no such directory"),
        (["draft={place}/eagle", "trained={place}/mtp"], "mtp: is the draft "),
        (["draft={place}/eagle", "data.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["draft={place}/eagle", "data.heldout=some.jsonl"], "data.heldout=some.jsonl: is not read here; leave it out"),
        ([], "draft.path is needed"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, given, said):
    assert run(tmp_path / "out", *[each.format(place=PLACE) for each in given]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line


def test_a_draft_for_a_target_of_other_sizes_is_a_mistake(tmp_path, capsys):
    place = shutil.copytree(PLACE / "eagle", tmp_path / "draft")

    def wider(values: dict) -> None:
        values["eagle_train"]["target"]["hidden_size"] = 128

    assert run(tmp_path / "out", f"draft={edited(place, wider)}") == 2
    assert "made for target" in capsys.readouterr().err


def test_findings_are_in_the_order_of_their_causes():
    found = in_order([Finding("undertrained", "a"), Finding("rope", "b", 1.0), Finding("rope", "c", 2.0)])
    assert found == [Finding("rope", "b c", 2.0), Finding("undertrained", "a")]


def test_a_long_diagnosis_is_short_on_the_terminal():
    every = [Finding(cause, "measured") for cause in CAUSES]
    found = Diagnosis(every, [NotChecked("a check", "a reason")])
    told = summary(found).splitlines()
    assert told[0] == f"{len(CAUSES)} problems, the most serious first"
    assert len(told) == 24
    whole = report(found, "DIR")
    assert all(cause.title in whole and cause.remedy in whole for cause in CAUSES.values())
    assert "a reason" in whole
