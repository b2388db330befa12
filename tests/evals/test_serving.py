"""A draft in vLLM beside our engine: a stand-in plays vLLM, and vLLM itself where it is installed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_train.artifacts.format import Artifact, load_draft, write_artifact
from eagle_train.drafts import EagleDraft
from eagle_train.drafts.peagle import PeagleConfig
from eagle_train.inference import Engine, Requests, SamplingParams
from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.loading import TargetConfig, load_target
from evals import serving
from evals.bench import statistics
from evals.bench.answering import answer_questions
from evals.bench.questions import read_questions
from evals.bench.vllm import counted
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, guessing_eagle3, make_home
from tests.support.fake_vllm import GOOD, giving, interpreter

ROOT = Path(__file__).parents[2]
OWN_VLLM = ROOT / ".venv-vllm/bin/python"


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("serving"), width=128)


@pytest.fixture(scope="module")
def given(home) -> list[str]:
    """The command's target, draft and questions."""
    exported(home, "vllm", first_token="skip")
    return arguments(home, f"draft.path={home}/vllm")


def exported_eagle3(home: Path, layout: str, quant: Quant, **kind) -> Path:
    """An EAGLE-3 draft for the home's target, with states of the target's only layer but the last, and all its tokens
    or some."""
    target = load_target(TargetConfig(str(home / "target")), "cpu")
    draft = guessing_eagle3(target, **kind)
    about = Artifact(draft.config, target.identity, layout, "float32", quant)
    return write_artifact(about, quantise_draft(draft, quant), home / f"eagle3-{layout}")


def exported(home: Path, name: str, dtype: str = "float32", quant: Quant | None = None, **changes) -> Path:
    """The home's draft, with changes of its config, as vLLM loads it."""
    target, draft = load_target(TargetConfig(str(home / "target")), "cpu"), load_draft(home / "draft")
    changed = EagleDraft(replace(draft.config, **changes)).init_weights(0)  # of weights it has more than the draft
    changed.load_state_dict(draft.state_dict(), strict=False)
    training = {"first_token": draft.config.first_token}
    about = Artifact(changed.config, target.identity, "vllm", dtype, quant or Quant(), training=training)
    return write_artifact(about, quantise_draft(changed, about.quant), home / name)


def test_counts_are_those_of_the_other_evaluations(home):
    engine = Engine(home / "target", home / "draft")
    questions = read_questions(str(home / "questions.jsonl"))
    answers = [
        answer
        for together in answer_questions(engine, Requests(engine.target), questions, SamplingParams(max_tokens=12))
        for answer in together
    ]
    counts = counted(answers, 12)
    assert counts.tpc == statistics.tpc(answers)
    assert counts.acceptance == statistics.acceptance(answers)
    assert counts.drafts > counts.accepted[0] > 0  # else the figures would say little


def test_the_whole_command(home, given, tmp_path, capsys):
    given = [*given, f"out={tmp_path}", "threads=2", "batch_size=2"]
    given += [f"vllm.python={interpreter(tmp_path, 'sys.exit(1)')}", "vllm.arguments={gpu_memory_utilization: 0.5}"]
    assert call(serving.main, *given) == 2
    assert "error: vLLM failed with status 1" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()

    job = json.loads((tmp_path / "vllm_job.json").read_text())
    engine = Engine(home / "target")
    (question, *_) = read_questions(str(home / "questions.jsonl"))
    messages = [{"role": "user", "content": question.turns[0]}]
    assert job["prompts"][0] == Requests(engine.target).tokens_of(messages, "the first")
    assert job["sampling"]["stop_token_ids"] == [0]
    assert job["llm"]["speculative_config"]["model"] == f"{home}/vllm"
    assert (job["llm"]["dtype"], job["llm"]["max_num_seqs"]) == ("float32", 2)
    assert job["llm"]["gpu_memory_utilization"] == 0.5
    longest = max(map(len, job["prompts"]))
    assert job["llm"]["max_model_len"] == longest + 12 + 2 * 3 + 1

    plain = engine.generate(job["prompts"], SamplingParams(max_tokens=12))
    tokens = [output.token_ids for output in plain]
    tokens[2] = [0]
    interpreter(tmp_path, giving(GOOD | {"token_ids": tokens}))
    assert call(serving.main, *given) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["prompts"], found["equal_answers"]) == (6, 5)
    assert found["vllm"]["acceptance_length"] == 2.0
    assert found["relative_difference"] == pytest.approx(2.0 / found["eagle_train"]["acceptance_length"] - 1)
    assert found["provenance"]["vllm"] == "0.32.0"
    assert sum(row["rounds"] for row in found["by_context"]) == found["eagle_train"]["drafts"]
    report = (tmp_path / "report.md").read_text()
    assert "Mind that serving engines begin the draft at the second token" in report
    assert "Answers with the same tokens: 5 of 6." in report
    assert "Of our engine: vLLM's counters tell no single rounds." in report
    assert f"| 1 + accepted / drafts | {found['eagle_train']['acceptance_length']:.3f} | 2.000 |" in report
    assert "answers with the same tokens: 5 of 6" in capsys.readouterr().out


def test_ignore_eos_holds_in_both_engines(given, tmp_path):
    given = [*given, f"out={tmp_path}", "ignore_eos=true", "limit=1"]
    assert call(serving.main, *given, f"vllm.python={interpreter(tmp_path, '')}") == 2
    assert json.loads((tmp_path / "vllm_job.json").read_text())["sampling"]["stop_token_ids"] == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("vllm.python=nowhere/python", "error: vllm.python=nowhere/python: no such program; `bash launch/vllm.sh`"),
        ("draft.path=HOME/draft", "error: draft=HOME/draft: of layout=native; export it with layout=vllm"),
        ("tree=n8", "error: tree (tree of 8 nodes, depth "),
        ("tree.length=0", "error: tree (no draft): vLLM drafts one chain"),
        ("tree=auto", "error: tree (auto: none, or of depth "),
        ("tree=dynamic", "error: tree (trees by row of "),
        ("engine.gate=true", "error: tree (chain3) and engine.gate=true: vLLM drafts one chain"),
        ("vllm.timeout_s=0", "error: vllm.timeout_s=0.0: must be above 0"),
        ("vllm.cpu_kv_gib=0", "error: vllm.cpu_kv_gib=0: must be at least 1"),
        ("vllm.arguments={model: other}", "error: vllm.arguments.model: follows from"),
        ("seed=3", "error: seed=3: decoding is greedy here, and nothing is drawn; leave it out"),
        ("max_tokens=1", "error: max_tokens=1: no answer has a second token"),
        ("draft.path=nowhere", "error: draft=nowhere: no config.json"),
    ],
)
def test_mistakes_are_one_line(home, given, tmp_path, capsys, override, message):
    override, message = (text.replace("HOME", str(home)) for text in (override, message))
    python = f"vllm.python={interpreter(tmp_path, giving(GOOD))}"
    assert call(serving.main, *given, f"out={tmp_path}", python, override) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert not (tmp_path / "results.json").exists()


@pytest.mark.skipif(not OWN_VLLM.exists(), reason="needs what launch/vllm.sh installs")
@pytest.mark.parametrize(
    ("norms", "scheme", "scope", "dtype"),
    [
        ("eagle1", "none", "ffn", "float32"),
        ("full", "none", "ffn", "float32"),
        ("eagle1", "fp8", "all_linear", "float32"),
        ("full", "fp8", "ffn", "float32"),
    ],
)
def test_vllm_itself_counts_as_we_do(tmp_path, capsys, norms, scheme, scope, dtype):
    """To the last accepted token, for a draft that begins at the same token as in vLLM."""
    home = make_home(tmp_path, width=256)
    draft = exported(home, "vllm", dtype, Quant(scheme, scope), norms=norms, first_token="skip")
    given = arguments(home, f"draft.path={draft}", f"out={tmp_path}/out", f"target.dtype={dtype}", "max_tokens=24")
    assert call(serving.main, *given, f"vllm.python={OWN_VLLM}") == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["equal_answers"] == found["prompts"] == 6
    assert found["vllm"] == found["eagle_train"]
    assert found["vllm"]["accepted_tokens"] > 0


FEW = {"vocab_size": 200, "vocabulary": [*range(57), *range(100, 243)]}


@pytest.mark.skipif(not OWN_VLLM.exists(), reason="needs what launch/vllm.sh installs")
@pytest.mark.parametrize(
    ("layout", "scheme", "kind"),
    [
        ("vllm", "none", {"config": PeagleConfig, "num_layers": 2, "steps": 3}),
        ("speculators", "none", {"config": PeagleConfig, "num_layers": 1, "norm_before_fc": True, **FEW}),
        ("vllm", "fp8", {"config": PeagleConfig, "num_layers": 2}),
        ("vllm", "none", {"layers": [1]}),
        ("sglang", "none", {}),
        ("vllm", "none", {"num_layers": 2, "norm_output": True, "fc_norm": True, **FEW}),
        ("speculators", "none", {"norm_before_residual": True, "norm_before_fc": True, **FEW}),
        ("vllm", "fp8", {"num_layers": 2}),
        ("speculators", "fp8", FEW),
    ],
    ids=[
        "P-EAGLE",
        "P-EAGLE of speculators",
        "P-EAGLE in fp8",
        "plain",
        "SGLang's",
        "two layers, some tokens",
        "speculators",
        "two layers in fp8",
        "speculators in fp8",
    ],
)
def test_vllm_itself_counts_an_eagle3_draft_as_we_do(tmp_path, capsys, layout, scheme, kind):
    home = make_home(tmp_path, width=256, num_layers=6)
    draft = exported_eagle3(home, layout, Quant(scheme), **{"layers": [1, 3, 5]} | kind)
    given = arguments(home, f"draft.path={draft}", f"out={tmp_path}/out", "target.dtype=float32", "max_tokens=24")
    assert call(serving.main, *given, f"vllm.python={OWN_VLLM}") == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["equal_answers"] == found["prompts"] == 6
    if scheme == "none":
        assert found["vllm"] == found["eagle_train"]
    # Activations in FP8 turn the last bits of fp32 into steps, by which two of the draft's tokens may change places.
    assert found["vllm"]["tpc"] == pytest.approx(found["eagle_train"]["tpc"], rel=0.02)
    assert found["vllm"]["accepted_tokens"] > 0
