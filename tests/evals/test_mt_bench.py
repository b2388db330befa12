"""evals.mt_bench: the whole command on a tiny target that writes nonsense; stages on a device that runs ahead."""

import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_train.distributed import World
from eagle_train.drafts import EagleDraft
from eagle_train.inference import SamplingParams, TreePlan, chain
from eagle_train.inference.decode.adaptive import Adaptive
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from evals import mt_bench, quantisation
from evals.bench import session, stage_clock, statistics
from evals.bench.page.gather import gather
from evals.bench.questions import read_questions
from tests.support.command_line import call
from tests.support.eval_inputs import TEMPLATE, arguments, make_home, write_rows
from tests.support.measuring import drafting_run


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("mt_bench"))


@pytest.fixture(scope="module")
def target(home):
    return load_target(TargetConfig(str(home / "target")), "cpu")


@pytest.fixture
def late(clock, monkeypatch) -> None:
    """A device that does its work when it is waited for. Seconds: target 3, draft 2."""
    work = [0.0]

    def wait() -> None:
        clock[0], work[0] = clock[0] + work[0], 0.0

    def launches(owner: type, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def launched(*arguments, **options):
            work[0] += seconds
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, launched)

    launches(Target, "hidden_states", 3)
    launches(EagleDraft, "forward", 2)
    monkeypatch.setattr(stage_clock, "wait_for_gpu", wait)
    for module in (stage_clock, mt_bench):
        monkeypatch.setattr(module, "runs_ahead", lambda device: True)


def test_a_report_that_cannot_be_right_is_not_written(home, tmp_path, monkeypatch, capsys):
    def has_speedup(value: float) -> None:
        found = {"speedup": value, "speedup_batch_median": value, "differing_answers": 0}
        monkeypatch.setattr(statistics, "compare", lambda plain, speculative, max_tokens: found)

    has_speedup(9.0)
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", "limit=1")) == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["answers_refused.jsonl"]  # which say why
    captured = capsys.readouterr()
    assert "the timing cannot be right" in captured.err
    assert "TPC" not in captured.out

    out = tmp_path / "out"
    has_speedup(0.5)
    assert call(mt_bench.main, *arguments(home, f"out={out}", "limit=1")) == 0
    assert not (out / "answers_refused.jsonl").exists()
    before = {name: (out / name).read_text() for name in ("answers.jsonl", "results.json")}
    has_speedup(9.0)
    assert call(mt_bench.main, *arguments(home, f"out={out}", "limit=2")) == 2
    assert {name: (out / name).read_text() for name in before} == before, "the result and its answers, of one run"
    (source,) = gather([str(out)])
    assert len(source.answers) == 2

    def ended(out: Path, found: dict, report: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "write_report", ended)
    has_speedup(0.5)
    assert call(mt_bench.main, *arguments(home, f"out={out}", "limit=2")) == 130
    assert not (out / "answers.jsonl").exists(), "none beside another run's result"


def test_a_gpu_is_waited_for_around_each_stage(home, target, late):
    """Seconds: target 3, draft 2, which pass when they are waited for; a round of chain3 drafts three times."""
    run, params = drafting_run(home, target, overlap=True), SamplingParams(max_tokens=9, ignore_eos=True)
    times = run.engine.stage_times
    for question in read_questions(str(home / "questions.jsonl")):
        run.ask([question], params)
    before, batches = dict(times.seconds), list(run.batches)
    found = mt_bench.stages(run, SimpleNamespace(params=params))
    decoding = {"drafting": 6000, "validation": 3000, "sampling": 0, "bookkeeping": 0}
    assert found == {"stage_ms_per_round": decoding, "prefill_ms_per_batch": 5000, "draft_latency_ms": 6000}
    assert (times.seconds, run.batches) == (before, batches)  # it was another batch


@pytest.mark.usefixtures("noisy")
def test_the_run_itself_waits_for_no_gpu(home, tmp_path, monkeypatch):
    """20 ms per wait: a stage has one, and the time between tokens none."""
    for module in (stage_clock, mt_bench):
        monkeypatch.setattr(module, "runs_ahead", lambda device: True)
    waits, measure = [], mt_bench.run_in_turn
    monkeypatch.setattr(stage_clock, "wait_for_gpu", lambda: (waits.append(1), time.sleep(0.02)))

    def left_alone(*arguments):
        measure(*arguments)
        assert not waits

    monkeypatch.setattr(mt_bench, "run_in_turn", left_alone)
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", "limit=1", "max_tokens=4")) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["draft_latency_ms"] == found["stage_ms_per_round"]["drafting"] >= 20
    assert found["plain_stage_ms_per_round"]["validation"] >= 20


def test_a_table_that_drafts_only_for_larger_batches_is_refused(home, tmp_path, capsys):
    table = tmp_path / "table.yaml"
    table.write_text("1: {parents: [-1]}\n4: {parents: [-1, 0, 1]}\n")
    given = arguments(home, f"out={tmp_path}/out", f"tree={table}")
    for command in (mt_bench.main, quantisation.main):
        assert call(command, *given) == 2
        assert (
            "error: tree (no draft): it drafts nothing at batch sizes up to batch_size=1, so" in capsys.readouterr().err
        )
        assert not (tmp_path / "out").exists()


def test_an_error_where_no_batch_had_a_size_that_is_drafted_for(home, tmp_path, capsys):
    """Both answers end together, so that there is no batch of one."""
    table = tmp_path / "table.yaml"
    table.write_text("1: {parents: [-1, 0]}\n2: {parents: [-1]}\n")
    write_rows(tmp_path / "questions.jsonl", [{"prompt": "a"}] * 2)
    given = [f"out={tmp_path}/out", f"tree={table}", "batch_size=2", f"questions={tmp_path}/questions.jsonl"]
    assert call(mt_bench.main, *arguments(home, *given)) == 2
    assert (
        "error: tree (chain1 (batch size 1), no draft (batch size 2)): no round was of a batch size"
        in capsys.readouterr().err
    )


@pytest.fixture
def declining(monkeypatch) -> None:
    """No drafts are expected to pay."""
    monkeypatch.setattr(Adaptive, "choose", lambda adaptive, rows: TreePlan(chain(0)))


@pytest.mark.usefixtures("declining")
def test_where_no_drafts_pay_the_figures_are_those_of_decoding_without(home, tmp_path, capsys):
    """However long its rounds take."""
    given = arguments(home, f"out={tmp_path}/out", "engine.gate=true", "limit=1", "max_tokens=4")
    assert call(mt_bench.main, *given) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (found["tpc"], found["acceptance_per_depth"], found["differing_answers"]) == (1, [], 0)
    assert found["train_serve_check"]["depth_1_served"] is None
    told = capsys.readouterr().out
    assert "acceptance by depth nothing drafted" in told
    assert told.endswith("report.md, results.json, answers.jsonl\n")
    report = (tmp_path / "out" / "report.md").read_text()
    assert "No round had drafts: they were not expected to pay." in report
    assert "acceptance.png" not in report
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["answers.jsonl", "report.md", "results.json"]

    assert call(quantisation.main, *given) == 2
    assert "engine.gate=true: no drafts were expected to pay, so there is nothing to measure" in capsys.readouterr().err


@pytest.mark.usefixtures("noisy")
def test_a_tree_that_each_round_chooses(home, tmp_path):
    given = arguments(home, f"out={tmp_path}/out", "tree=dynamic", "limit=1", "max_tokens=4")
    assert call(mt_bench.main, *given) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["train_serve_check"]["depth_1_served"] == found["acceptance_per_depth"][0] > 0
    assert found["train_serve_check"]["depth_1_as_trained"] is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["questions=nowhere.jsonl"], "error: questions=nowhere.jsonl: no such file"),
        (["draft.path=nowhere"], "error: draft=nowhere: no config.json"),
        (["drafter=ngram", "draft.alignment=last"], "error: draft.alignment=last: this drafter does not read it"),
        (["drafter=ngram"], "error: draft: drafter=ngram has no model; leave draft= out"),
        (["draft.path=null"], "error: draft is needed: give draft=DIR, or drafter=ngram, say"),
        (["drafter=ngram", "draft.path=null", "quant=fp8"], "error: quant.scheme=fp8: no draft to quantise"),
        (["tree.length=0"], "error: tree (no draft): it drafts nothing"),
        (["draft.alignment=first"], "error: draft.alignment=first: must be accepted or last"),
        (["engine.drafting=best"], "error: engine.drafting='best': must be one of greedy, multinomial, "),
        (["limit=few"], "error: limit=few: must be a whole number"),
        (["batch_size=0"], "error: batch_size=0: must be at least 1"),
        (["threads=0"], "error: threads=0: must be at least 1, or null"),
        (["engine.max_batch_size=4"], "error: engine.max_batch_size=4: follows from the batch size here; leave it out"),
        (
            ["suite=gsm8k"],
            "error: questions={home}/questions.jsonl: give a file of questions, or a suite; now suite is G",
        ),
        (["questions=null"], "error: questions=null: give a file of questions, or a suite; now suite is null"),
        (["suite.thinking=false"], "error: suite.thinking: needs suite=NAME"),
        (
            ["suite=gsm8k", "questions=null", "suite.path=nowhere"],
            "error: suite.path=nowhere: no such file; give GSM8K's",
        ),
        (
            ["suite=own", "questions=null", "suite.path={home}/questions.jsonl", "suite.thinking=true"],
            "error: suite.thinking=true: the chat template of {home}/target reads no enable_thinking; leave it out",
        ),
        (["too_long=cut"], "error: too_long=cut: must be refuse or leave_out"),
        (["too_long=leave_out", "max_tokens=256"], "error: max_tokens=256: no question fits the context of"),
        (["context_lengths=[0]"], "error: context_lengths=[0]: must be numbers from 1 on"),
        (["context_lengths=[256]"], "error: context_lengths=256: with max_tokens=12 beyond the 256 of"),
        (["documents=a.jsonl"], "error: documents=a.jsonl: needs context_lengths"),
        (["context_lengths=[64]", "documents=a.jsonl"], "error: documents=a.jsonl: no such file"),
        (["max_tokens=1"], "error: max_tokens=1: no answer has a second token"),
        (["depth=3"], "error: depth=3: no such key"),
        (["out={home}/draft/config.json"], "error: out="),
    ],
)
def test_mistakes_are_one_line(home, tmp_path, capsys, overrides, message):
    overrides = [override.format(home=home) for override in overrides]
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *overrides)) == 2
    progress = re.compile(r"Loading weights|batch \d+/\d+, ")
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not progress.search(line)]
    assert len(lines) == 1
    assert lines[0].startswith(message.format(home=home))
    assert not (tmp_path / "out" / "results.json").exists()


@pytest.mark.usefixtures("noisy")
def test_the_alignment_is_the_drafters(home, tmp_path, monkeypatch):
    seen, measure = [], mt_bench.run_in_turn

    def watched(runs, *rest):
        seen.append(runs[1].drafter.alignment)
        measure(runs, *rest)

    monkeypatch.setattr(mt_bench, "run_in_turn", watched)
    for override in ([], ["draft.alignment=last"]):
        assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *override)) == 0
        assert json.loads((tmp_path / "out" / "results.json").read_text())["alignment"] == seen[-1]
    assert seen == ["accepted", "last"]


@pytest.mark.usefixtures("noisy")
def test_a_drafter_without_a_draft(home, tmp_path):
    """What is of a draft's artifact is null; the drafter and its options are told."""
    write_rows(tmp_path / "questions.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    given = ["draft.path=null", "drafter=ngram", "drafter.max_draft_len=3", f"questions={tmp_path}/questions.jsonl"]
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *given, "max_tokens=40")) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    keys = (
        "draft_source",
        "draft_training",
        "train_serve_check",
        "alignment",
        "quant",
        "acceptance_after_depth_before",
    )
    assert [found[key] for key in keys] == [None] * 6
    assert (found["drafter"], found["config"]["drafter"]["max_draft_len"], found["differing_answers"]) == (
        "ngram",
        3,
        0,
    )
    report = (tmp_path / "out" / "report.md").read_text()
    assert "; drafter `eagle_train.inference.drafters.ngram.make_ngram` (max_draft_len=3, " in report
    assert "draft `None`" not in report
    assert "Train/serve" not in report


def test_a_timing_that_cannot_be_right_is_judged_by_the_first_rank(home, tmp_path, capsys, monkeypatch):
    """Whatever this rank's times are, so that all ranks end alike."""
    first = {"speedup": 99.0, "speedup_interval": None}
    monkeypatch.setattr(World, "agreed", lambda world, found: found | first)
    given = arguments(home, f"out={tmp_path}/out", "limit=1", "max_tokens=4")
    assert call(mt_bench.main, *given) == 2
    assert "error: speed-up 99.000 exceeds " in capsys.readouterr().err


def test_a_drafter_that_finds_nothing_is_one_line(home, tmp_path, capsys):
    nothing = ["draft.path=null", "drafter=ngram", "max_tokens=2", "limit=1", "drafter.max_matching_ngram_size=1"]
    write_rows(tmp_path / "questions.jsonl", [{"prompt": "b"}])
    given = [*nothing, f"questions={tmp_path}/questions.jsonl"]
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *given)) == 2
    assert "error: drafter=ngram: it drafted nothing for these questions" in capsys.readouterr().err


@pytest.mark.usefixtures("noisy")
def test_drafts_that_are_drawn(home, tmp_path):
    drawn = ["engine.drafting=multinomial_without_replacement", "temperature=0.5", "tree=d3_bf2"]
    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *drawn)) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["config"]["engine"]["drafting"] == "multinomial_without_replacement"
    assert found["train_serve_check"]["depth_1_as_trained"] is None
    assert found["differing_answers"] is None
    assert "left out" in (tmp_path / "out" / "report.md").read_text()

    assert call(mt_bench.main, *arguments(home, f"out={tmp_path}/out", *drawn[1:])) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["differing_answers"] == 0


@pytest.mark.usefixtures("noisy", "few")
def test_a_suite_with_thinking_on_and_off(home, target, tmp_path, monkeypatch):
    """The template's variable is rendered, so that prompts differ; both are told in the report."""
    template = tmp_path / "thinking.jinja"
    template.write_text(TEMPLATE.replace("<a>", "<a>{{ '' if enable_thinking else '<think></think>' }}"))
    rows = [{"text": f"Hallo {place}", "language": language} for place, language in enumerate(("de", "fr", "de", "fr"))]
    write_rows(tmp_path / "own.jsonl", rows)
    given = ["suite=own", "questions=null", f"suite.path={tmp_path}/own.jsonl", "suite.category=language"]
    given += ["suite.columns.prompt=text", f"target.chat_template={template}"]
    found, asked, measure = {}, [], mt_bench.run_in_turn

    def watched(runs, *rest):
        measure(runs, *rest)
        asked.append([target.tokenizer.decode(answer.prompt) for answer in runs[1].answers])

    monkeypatch.setattr(mt_bench, "run_in_turn", watched)
    for thinking in ("true", "false"):
        out = tmp_path / thinking
        assert call(mt_bench.main, *arguments(home, *given, f"suite.thinking={thinking}", f"out={out}")) == 0
        found[thinking] = json.loads((out / "results.json").read_text())
        assert found[thinking]["suite"]["thinking"] is (thinking == "true")
        assert f"thinking {'on' if thinking == 'true' else 'off'};" in (out / "report.md").read_text()
    assert asked[0] == [f"<u>Hallo {place}<a>" for place in range(4)]
    assert asked[1] == [f"<u>Hallo {place}<a><think></think>" for place in range(4)]
    groups = {each["category"]: each for each in found["true"]["per_category_and_turn"] if each["turn"] is None}
    assert set(groups) == {"de", "fr", None}
    for each in groups.values():
        low, high = each["tpc_interval"]
        assert low <= each["tpc"] <= high
        assert each["speedup_interval"][0] <= each["speedup"] <= each["speedup_interval"][1]


@pytest.mark.usefixtures("noisy")
def test_questions_at_several_contexts(home, tmp_path):
    """Each question at each length, and rounds in the buckets of these."""
    write_rows(tmp_path / "documents.jsonl", [{"question": f"ask {i}", "answer": "x" * 20} for i in range(9)])
    given = ["context_lengths=[60,180]", f"documents={tmp_path}/documents.jsonl", f"out={tmp_path}/out"]
    assert call(mt_bench.main, *arguments(home, *given)) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["prompts"] == 12
    assert [row["to"] for row in found["by_context"]] == [64, 128, 256]
    assert sum(row["rounds"] for row in found["by_context"]) == found["calls"]
    rows = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert {row["question_id"] for row in rows} == {f"{name} at {n}" for name in (81, 82, 101) for n in (60, 180)}


@pytest.mark.usefixtures("noisy")
def test_documents_are_all_questions_of_the_file(home, tmp_path):
    """Whatever the limit: the one that is asked stands behind the others."""
    write_rows(tmp_path / "q.jsonl", [{"question": f"ask {i}", "answer": "x" * 20} for i in range(5)])
    given = [f"questions={tmp_path}/q.jsonl", "context_lengths=[120]", "limit=1", f"out={tmp_path}/out"]
    assert call(mt_bench.main, *arguments(home, *given)) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["prompts"] == 1
    assert [row["to"] for row in found["by_context"]] == [128]


@pytest.mark.usefixtures("noisy")
def test_questions_that_are_too_long_are_left_out(home, tmp_path):
    write_rows(tmp_path / "q.jsonl", [{"prompt": "a"}, {"prompt": "b" * 250}])
    given = [f"questions={tmp_path}/q.jsonl", "too_long=leave_out", f"out={tmp_path}/out"]
    assert call(mt_bench.main, *arguments(home, *given)) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (found["questions"], found["too_long"]) == (1, 1)


def test_the_whole_command(home, target, tmp_path):
    out = tmp_path / "out"
    run = [sys.executable, "-m", "evals.mt_bench", *arguments(home, f"out={out}", "tree=chain5", "batch_size=2")]
    root = Path(__file__).parents[2]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.match(r"TPC \d\.\d\d \(chain5, temperature 0, 6 prompts; repeated 8-grams \d+\.\d %\)\n", done.stdout)
    assert sorted(path.name for path in out.iterdir()) == [
        "acceptance.png",
        "answers.jsonl",
        "report.md",
        "results.json",
    ]

    found = json.loads((out / "results.json").read_text())
    assert {"tpc", "speedup", "ttft_s", "ttit_s", "acceptance_per_depth", "plain_ttit_s"} <= found.keys()
    assert found["speedup"] == pytest.approx(found["plain_ttit_s"] / found["ttit_s"])
    assert found["differing_answers"] == 0
    assert (found["questions"], found["prompts"], len(found["acceptance_per_depth"])) == (3, 6, 5)
    assert found["config"]["seed"] == 0
    assert "torch" in found["provenance"]
    assert found["target_source"] == target.identity.fingerprint

    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert Counter(row["turn"] for row in rows) == {1: 3, 2: 3}
    assert len({row["prompt"] for row in rows}) == 6
    assert sum(row["tokens"] for row in rows) / sum(row["calls"] for row in rows) == found["tpc"]
    for seconds, tokens, ttit in (
        ("decode_s", "tokens", found["ttit_s"]),
        ("plain_decode_s", "plain_tokens", found["plain_ttit_s"]),
    ):
        assert sum(row[seconds] for row in rows) / sum(row[tokens] for row in rows) == pytest.approx(ttit)
    assert found["speedup_interval"] is None  # of three questions
    assert "| writing | 4 |" in (out / "report.md").read_text()
    assert (out / "acceptance.png").read_bytes().startswith(b"\x89PNG")
