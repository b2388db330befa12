"""A draft in vLLM beside our engine: counts by hand, a stand-in that plays vLLM, and vLLM itself where it is there."""

import fcntl
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_train.artifacts.format import Artifact, load_draft, write_artifact
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.models.draft import Draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.quantised import Quant, quantised
from evals import figures, serving
from evals.mt_bench import ask
from evals.questions import read_questions
from evals.serving import VLLM, Counts, counted, serve, version_of
from tests.support.command_line import call
from tests.support.eval_inputs import arguments, make_home

ROOT = Path(__file__).parents[2]
OWN_VLLM = ROOT / ".venv-vllm/bin/python"
GOOD = {"drafts": 4, "draft_tokens": 12, "accepted_tokens": 4, "accepted_tokens_per_pos": [3, 1, 0]}
GOOD |= {"token_ids": [[5] * 6, [7] * 4]}


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return make_home(tmp_path_factory.mktemp("serving"), width=128)


@pytest.fixture(scope="module")
def given(home) -> list[str]:
    """The command's target, draft and questions."""
    exported(home, "vllm", first_token="skip")
    return arguments(home, f"draft.path={home}/vllm")


def exported(home: Path, name: str, dtype: str = "float32", quant: Quant | None = None, **changes) -> Path:
    """The home's draft, with changes of its config, as vLLM loads it."""
    target, draft = load_target(TargetConfig(str(home / "target"))), load_draft(home / "draft")
    changed = Draft(replace(draft.config, **changes)).init_weights(0)  # of weights it has more than the draft
    changed.load_state_dict(draft.state_dict(), strict=False)
    training = {"first_token": draft.config.first_token}
    about = Artifact(changed.config, target.identity, "vllm", dtype, quant or Quant(), training=training)
    return write_artifact(about, quantised(changed, about.quant), home / name)


def interpreter(directory: Path, answering: str) -> Path:
    """A program that says it can import vLLM, and does with a `job` what it is told to."""
    path = directory / "python"
    importing = 'if sys.argv[1] == "-c":\n    print("a warning\\n0.32.0")\n    sys.exit()\n'
    lines = f"#!{sys.executable}\nimport json, sys\n{importing}job = json.load(open(sys.argv[2]))\n{answering}\n"
    path.write_text(lines)
    path.chmod(0o755)
    return path


def giving(answer: dict | str) -> str:
    """What writes this answer."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return f"open(job['answer'], 'w').write({text!r})"


def served(directory: Path, answering: str, timeout_s: float = 60) -> Counts:
    job = {"llm": {"speculative_config": {"num_speculative_tokens": 3}}, "prompts": [[1], [2]]}
    vllm = VLLM(str(interpreter(directory, answering)), timeout_s, 1, None)
    return serve(job | {"answer": str(directory / "vllm_answer.json")}, vllm, directory)


def test_counts_by_hand():
    counts = Counts(4, [3, 1, 0], [[5] * 6, [7] * 4])
    assert (counts.acceptance_length, counts.acceptance) == (2.0, [3 / 4, 1 / 4, 0])
    assert counts.tpc == (5 + 3) / 4
    assert counts.figures["accepted_tokens"] == 4


def test_counts_are_those_of_the_other_evaluations(home):
    engine = Engine(home / "target", home / "draft")
    questions = read_questions(str(home / "questions.jsonl"))
    answers = [answer for together in ask(engine, questions, SamplingParams(max_tokens=12)) for answer in together]
    counts = counted(answers)
    assert counts.tpc == figures.tpc(answers)
    assert counts.acceptance == figures.acceptance(answers)
    assert counts.drafts > counts.accepted[0] > 0  # else the figures would say little


def test_an_answer_is_read(tmp_path):
    (tmp_path / "vllm_answer.json").write_text("of an earlier run")
    assert served(tmp_path, f"print('loaded')\n{giving(GOOD)}") == Counts(4, [3, 1, 0], [[5] * 6, [7] * 4])
    assert (tmp_path / "vllm.log").read_text() == "loaded\n"


@pytest.mark.parametrize(
    ("answering", "message"),
    [
        ("print('loading')\nraise ValueError('no such draft')", "failed with status 1: ValueError: no such draft (all"),
        ("sys.exit(3)", "vLLM failed with status 3: it said nothing (all"),
        ("import os\nos.abort()", "vLLM failed with status -6: it said nothing (all"),
        ("", "vLLM ended without an answer"),
        (giving("0 drafts"), "no answer to the job: JSONDecodeError"),
        (giving("[]"), "no answer to the job: TypeError"),
        (giving({key: GOOD[key] for key in GOOD if key != "drafts"}), "no answer to the job: KeyError 'drafts'"),
        (giving(GOOD | {"token_ids": [[5]]}), "no answer to the job: 2 prompts, 3 tokens a draft"),
        (giving(GOOD | {"accepted_tokens_per_pos": [3, 1]}), "no answer to the job: 2 prompts, 3 tokens a draft"),
        (giving(GOOD | {"accepted_tokens": 5}), "no answer to the job: 2 prompts, 3 tokens a draft"),
        (giving(GOOD | {"drafts": 0}), "vLLM drafted nothing"),
    ],
)
def test_a_failure_is_one_line(tmp_path, answering, message):
    (tmp_path / "vllm_answer.json").write_text(json.dumps(GOOD))  # of an earlier run
    with pytest.raises(UserError, match=r"^[^\n]*$") as error:
        served(tmp_path, answering)
    assert message in str(error.value)
    assert (tmp_path / "vllm.log").is_file()


def test_vllm_and_what_it_started_are_ended_in_time(tmp_path):
    """A child that holds a lock and would sleep for ten minutes: the lock is to be had at once."""
    child = (
        "import fcntl, time; fcntl.flock(open('FILE', 'w'), fcntl.LOCK_EX); print('there', flush=True); time.sleep(600)"
    )
    child = child.replace("FILE", str(tmp_path / "lock"))
    hanging = f"import subprocess\nsubprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(UserError, match=r"vLLM took longer than vllm\.timeout_s=3 and was ended"):
        served(tmp_path, hanging, timeout_s=3)
    assert (tmp_path / "vllm.log").read_text() == "there\n"
    with open(tmp_path / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_the_whole_command(home, given, tmp_path, capsys):
    given = [*given, f"out={tmp_path}", "threads=2", "batch_size=2"]
    given += [f"vllm.python={interpreter(tmp_path, 'sys.exit(1)')}", "vllm.arguments={gpu_memory_utilization: 0.5}"]
    assert call(serving.main, *given) == 2
    assert "error: vLLM failed with status 1" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()

    job = json.loads((tmp_path / "vllm_job.json").read_text())
    engine = Engine(home / "target")
    (question, *_) = read_questions(str(home / "questions.jsonl"))
    assert job["prompts"][0] == engine.requests.tokens_of([{"role": "user", "content": question.turns[0]}], "the first")
    assert job["sampling"]["stop_token_ids"] == [0]
    assert job["llm"]["speculative_config"]["model"] == f"{home}/vllm"
    assert (job["llm"]["dtype"], job["llm"]["max_num_seqs"]) == ("float32", 2)
    assert job["llm"]["gpu_memory_utilization"] == 0.5
    longest = max(map(len, job["prompts"]))
    assert job["llm"]["max_model_len"] == longest + 12 + 3 + 1

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
    report = (tmp_path / "report.md").read_text()
    assert "Mind that serving engines begin the draft at the second token" in report
    assert "Answers with the same tokens: 5 of 6." in report
    assert f"| 1 + accepted / drafts | {found['eagle_train']['acceptance_length']:.3f} | 2.000 |" in report
    assert "answers with the same tokens: 5 of 6" in capsys.readouterr().out


def test_stop_tokens_end_nothing_in_either(given, tmp_path):
    given = [*given, f"out={tmp_path}", "ignore_eos=true", "limit=1"]
    assert call(serving.main, *given, f"vllm.python={interpreter(tmp_path, '')}") == 2
    assert json.loads((tmp_path / "vllm_job.json").read_text())["sampling"]["stop_token_ids"] == []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("vllm.python=nowhere/python", "error: vllm.python=nowhere/python: no such program; `bash launch/vllm.sh`"),
        ("draft.path=HOME/draft", "error: draft=HOME/draft: of engine=native; export it with engine=vllm"),
        ("tree=n8", "error: tree: vLLM drafts one chain"),
        ("tree.length=0", "error: tree: vLLM drafts one chain"),
        ("vllm.timeout_s=0", "error: vllm.timeout_s=0.0: must be above 0"),
        ("vllm.cpu_kv_gib=0", "error: vllm.cpu_kv_gib=0: must be at least 1"),
        ("vllm.arguments={model: other}", "error: vllm.arguments.model: follows from"),
        ("max_tokens=1", "error: no answer has a second token"),
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


def test_a_python_without_vllm_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"cannot import vllm: ModuleNotFoundError: No module named 'vllm'; `bash"):
        version_of(sys.executable)


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
    """To the last accepted token, for a draft that begins where vLLM's does."""
    home = make_home(tmp_path, width=256)
    draft = exported(home, "vllm", dtype, Quant(scheme, scope), norms=norms, first_token="skip")
    given = arguments(home, f"draft.path={draft}", f"out={tmp_path}/out", f"target.dtype={dtype}", "max_tokens=24")
    assert call(serving.main, *given, f"vllm.python={OWN_VLLM}") == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "out/results.json").read_text())
    assert found["equal_answers"] == found["prompts"] == 6
    assert found["vllm"] == found["eagle_train"]
    assert found["vllm"]["accepted_tokens"] > 0
