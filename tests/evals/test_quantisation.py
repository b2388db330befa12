"""The paper's table 2 for any draft: ratios by hand, and the whole command on a tiny target."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle_train import export
from eagle_train.artifacts.format import load_draft, read_artifact, save_draft
from eagle_train.drafts import EagleDraft
from eagle_train.errors import UserError
from eagle_train.inference import Eagle, Engine, Output, Requests, SamplingParams, Stats
from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from evals import mt_bench, quantisation
from evals.bench import stage_clock
from evals.bench.quantised_drafts import TimedRun, feed_forward_bytes, unfit
from evals.bench.questions import Question
from evals.bench.statistics import Answer
from evals.quantisation import measured
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home, write_rows
from tests.support.tiny import tiny_draft

WIDTH = 128
FFN = 3 * 3 * WIDTH * 2 * WIDTH  # weights: layers, matrices, outputs, inputs


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("quantisation"), width=WIDTH)


@pytest.fixture(scope="module")
def target(home):
    return load_target(TargetConfig(str(home / "target")), "cpu")


def made(home: Path, target: Target, **options) -> TimedRun:
    drafter = Eagle(load_draft(home / "draft"), target)
    return TimedRun(Engine(target, drafter, **options), Requests(target), drafter)


def run(timed: TimedRun, drafting, tokens) -> TimedRun:
    stats = Stats(calls=4, tokens=tokens, accepted_per_depth=[3, 1], drafted_per_depth=[4, 4])
    answer = Answer(Question(1, 1, None, [], ["?"]), 1, [7], Output([5] * tokens, "", "stop", stats, []))
    return TimedRun(timed.engine, timed.requests, timed.drafter, [[answer]], drafting)


def test_ratios_are_those_of_the_same_batch(home, target):
    """A disturbed batch, and one without a round, change no median."""
    engine = made(home, target)
    plain = run(engine, [(0.010, 10), (0.0, 0), (0.030, 10), (0.500, 10)], 8)
    config = SimpleNamespace(max_tokens=8, batch_size=1)
    found = measured(run(engine, [(0.008, 10), (0.0, 0), (0.018, 10), (0.500, 5)], 7), plain, config)
    assert found["draft_latency_ms"] == pytest.approx(1.8)
    assert found["relative_draft_latency"] == pytest.approx(0.8)
    assert found["tpc_change_interval"] is found["relative_draft_latency_interval"] is None  # of one question
    longer = [(0.010, 10)] * 6
    found6 = measured(run(engine, [(0.008, 10)] * 5 + [(0.5, 10)], 7), run(engine, longer, 8), config)
    assert found6["relative_draft_latency_interval"] == pytest.approx((0.8, 50))
    assert (found["tpc"], found["tpc_change"], found["tokens"], found["calls"]) == (7 / 4, 7 / 8 - 1, 7, 4)
    assert found["acceptance_per_depth"] == [3 / 4, 1 / 4]
    assert found["differing_answers"] == 1
    assert measured(plain, plain, config)["tpc_change"] == 0
    assert measured(plain, plain, config)["differing_answers"] == 0


@pytest.mark.parametrize("gpu", [False, True])
def test_drafting_is_timed_for_each_batch(home, target, clock, monkeypatch, gpu):
    """Two seconds per forward of the draft, three forwards a round; on a GPU they pass when it is waited for."""
    timed, plain = (made(home, target, overlap=gpu) for _ in range(2))
    forward, work = EagleDraft.forward, [0.0]

    def wait() -> None:
        clock[0], work[0] = clock[0] + work[0], 0.0

    def launched(*arguments, **options):
        work[0] += 2
        if not gpu:
            wait()
        return forward(*arguments, **options)

    monkeypatch.setattr(EagleDraft, "forward", launched)
    monkeypatch.setattr(stage_clock, "runs_ahead", lambda device: gpu)
    monkeypatch.setattr(stage_clock, "wait_for_gpu", wait)
    questions = [Question(1, 1, None, [], ["Why?", "Is it?"]), Question(2, 2, None, [], ["So?"])]
    for question in questions:
        timed.ask([question], SamplingParams(max_tokens=9, ignore_eos=True))
        plain.ask([question], SamplingParams(max_tokens=9, ignore_eos=True))
    calls = [[answer.output.stats.calls for answer in timed.answers if answer.question is q] for q in questions]
    assert [len(theirs) for theirs in calls] == [2, 1]
    rounds = [rounds for _, rounds in timed.drafting]
    assert [seconds for seconds, _ in timed.drafting] == [6 * each for each in rounds]
    if gpu:  # which may have begun a round more than an answer needs
        assert all(sum(own) <= each <= sum(own) + len(own) for own, each in zip(calls, rounds, strict=True))
    else:
        assert rounds == list(map(sum, calls))


def test_the_bytes_of_feed_forward_parts(home, target):
    draft = load_draft(home / "draft")
    sizes = [feed_forward_bytes(quantise_draft(draft, Quant(scheme))) for scheme in ("none", "fp8", "int4")]
    outputs = 3 * (2 * 2 * WIDTH + WIDTH)
    assert sizes == [4 * FFN, FFN + 4 * outputs, FFN // 2 + 2 * FFN // 128]


@pytest.mark.usefixtures("noisy", "few")
def test_the_whole_command(home, tmp_path, capsys):
    out = tmp_path / "out"
    assert call(quantisation.main, *arguments(home, f"out={out}")) == 0
    found = json.loads((out / "results.json").read_text())
    assert list(found["schemes"]) == ["none", "fp8", "int4"]
    plain = found["schemes"]["none"]
    assert (plain["tpc_change"], plain["relative_draft_latency"], found["prompts"]) == (0, 1, 6)
    assert plain["tpc_change_interval"] == [0, 0]  # the same questions are drawn for both
    assert "| as it is | " in (out / "report.md").read_text()
    assert "| 0.0 % (0.0 % to 0.0 %) |" in (out / "report.md").read_text()
    for figures in found["schemes"].values():
        low, high = figures["tpc_change_interval"]
        assert low <= figures["tpc_change"] <= high
        assert figures["differing_answers"] == 0
        assert figures["draft_latency_ms"] > 0
        assert len(figures["acceptance_per_depth"]) == 3
        assert sum(row["rounds"] for row in figures["by_context"]) == figures["calls"]
    held = {scheme: figures["feed_forward_bytes"] for scheme, figures in found["schemes"].items()}
    assert held["int4"] < held["none"] / 7
    report = (out / "report.md").read_text()
    assert f"| INT4 | {found['schemes']['int4']['tpc']:.3f} |" in report
    assert "Answers that differ from those with the draft as it is: FP8 0, INT4 0." in report
    assert "## By context" in report
    assert "provenance" in found
    assert "| as it is |" in capsys.readouterr().out

    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/alone", "quant=int4")) == 0
    alone = json.loads((tmp_path / "alone" / "results.json").read_text())
    assert alone["quant"] == "int4 (ffn)"
    for key in ("tpc", "acceptance_per_depth"):
        assert alone[key] == found["schemes"]["int4"][key]
    assert f"`{home}/draft`, int4 (ffn);" in (tmp_path / "alone" / "report.md").read_text()


def test_exports_are_measured_too_and_go_into_a_card(home, tmp_path, capsys):
    small, out = tmp_path / "small", tmp_path / "out"
    given = [f"checkpoint={home}/draft", f"out={small}", "dtype=float32"]
    assert call(export.main, *given, "quant=int4") == 0
    assert call(quantisation.main, *arguments(home, f"out={out}", f"also=[{small}]")) == 0
    schemes = json.loads((out / "results.json").read_text())["schemes"]
    assert list(schemes) == ["none", "fp8", "int4", "int4 (ffn), nearest"]
    alike = ("tpc", "acceptance_per_depth", "feed_forward_bytes")
    assert [schemes["int4"][key] for key in alike] == [schemes["int4 (ffn), nearest"][key] for key in alike]
    assert "| int4 (ffn), nearest |" in (out / "report.md").read_text()
    assert call(export.main, *given, "quant=int4", f"evaluations=[{out}/results.json]") == 0
    assert f"| int4 (ffn), nearest | chain3 | 0 | 6 of questions.jsonl | {schemes['int4']['tpc']:.3f} |" in (
        (small / "README.md").read_text()
    )

    other = tmp_path / "other"  # rounded alike, it is another row
    assert call(export.main, f"checkpoint={home}/draft", f"out={other}", "dtype=float32", "quant=int4") == 0
    assert call(quantisation.main, *arguments(home, f"out={out}", f"also=[{small},{other}]", "limit=1")) == 0
    schemes = json.loads((out / "results.json").read_text())["schemes"]
    assert list(schemes)[3:] == [f"int4 (ffn), nearest, {path}" for path in (small, other)]

    assert call(quantisation.main, *arguments(home, f"out={tmp_path}/none", f"draft={small}")) == 2
    assert f"error: draft={small}: quantised already, int4 (ffn); export it with quant=none" in capsys.readouterr().err

    assert call(quantisation.main, *arguments(home, f"out={tmp_path}/none", f"also=[{home}/draft]")) == 2
    assert f"error: also={home}/draft: is not quantised; " in capsys.readouterr().err

    other = tmp_path / "other"
    draft = load_draft(home / "draft")
    with torch.no_grad():
        draft.fc.weight.mul_(2.0)
    save_draft(draft, other, read_artifact(home / "draft").target)
    assert call(quantisation.main, *arguments(home, f"out={tmp_path}/none", f"also=[{other}]")) == 2
    assert f"error: also={other}: made from a draft of fingerprint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scope=head", "error: scope=head: must be ffn or all_linear"),
        ("batch_size=0", "error: batch_size=0: must be at least 1"),
        ("tree.length=0", "error: tree (no draft): it drafts nothing"),
        ("max_tokens=1", "error: max_tokens=1: no answer has a second token"),
        ("draft.path=nowhere", "error: draft=nowhere: no config.json"),
    ],
)
def test_mistakes_are_one_line(home, tmp_path, capsys, override, message):
    assert call(quantisation.main, *arguments(home, f"out={tmp_path}/out", override)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert not (tmp_path / "out" / "results.json").exists()


def test_an_error_where_no_batch_had_a_size_that_is_drafted_for(home, tmp_path, capsys):
    """Both answers end together, so that there is no batch of one."""
    table = tmp_path / "table.yaml"
    table.write_text("1: {parents: [-1, 0]}\n2: {parents: [-1]}\n")
    write_rows(tmp_path / "questions.jsonl", [{"prompt": "a"}] * 2)
    given = [f"out={tmp_path}/out", f"tree={table}", "batch_size=2", f"questions={tmp_path}/questions.jsonl"]
    assert call(quantisation.main, *arguments(home, *given)) == 2
    assert (
        "error: tree (chain1 (batch size 1), no draft (batch size 2)): no round was of a batch size"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("noisy")
def test_int4_is_left_out_for_a_draft_too_narrow(tmp_path, capsys):
    """No draft of another width is asked for, and FP8 is measured."""
    home = make_home(tmp_path)
    assert call(quantisation.main, *arguments(home, f"out={tmp_path}/out")) == 0
    told = "INT4 is left out: layers.0.mlp.gate_proj of the draft has 64 outputs and 32 inputs; must be multiples of 16"
    assert told in capsys.readouterr().out
    assert told in (tmp_path / "out" / "report.md").read_text()
    assert list(json.loads((tmp_path / "out" / "results.json").read_text())["schemes"]) == ["none", "fp8"]


def test_a_draft_that_no_scheme_fits_is_refused(target, tmp_path):
    narrow = tiny_draft(target, intermediate_size=24)
    with pytest.raises(UserError, match=r"^scope=ffn: .* must be multiples of 16 and 16.*no scheme fits this draft$"):
        unfit(narrow, "ffn")
