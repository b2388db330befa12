"""evals.ablations: steps by the ratio of times, results that are made once; the whole command on tiny models."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle_train import train
from eagle_train.cli import compose
from eagle_train.errors import UserError
from eagle_train.settings import build
from evals import ablations
from evals.bench import ablation_runs
from evals.bench.worker import Worker
from tests.support.command_line import call, chats, write_jsonl
from tests.support.eval_inputs import make_home


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = make_home(tmp_path_factory.mktemp("ablations"))
    write_jsonl(home / "chats.jsonl", chats(40))
    return home


def given(home: Path, *overrides: str) -> list[str]:
    """The command's arguments for two variants of a run on the tiny target."""
    base = [
        *(f"target.path={home}/target", "data=messages", f"data.path={home}/chats.jsonl", "data.row_tokens=64"),
        *("train.micro_batch_rows=1", "optim.tokens_per_step=64", "draft.num_layers=1"),
        *("train.steps=100", "optim.decay_share=0.5"),
    ]
    variants = ["+variants.plain=['optim.decay_share=0']", "only=[base,plain,lk]"]
    sizes = ["steps=8", "rounds=1", "timed_steps=1", "max_tokens=12", "limit=null", "batch_size=2", "device=cpu"]
    paths = [f"questions={home}/questions.jsonl", f"out={home}/out"]
    quoted = ",".join(f"'{override}'" for override in base)
    return [f"base=[{quoted}]", *variants, *sizes, *paths, *overrides]


@pytest.fixture
def in_process(monkeypatch) -> list[list[str]]:
    """Training runs in this process; its overrides are recorded. A variant's step takes twice as long as the base's."""
    runs = []

    def started(command: list[str], **_) -> SimpleNamespace:
        runs.append(command[3:])
        return SimpleNamespace(returncode=train.job(compose("train", command[3:])))

    monkeypatch.setattr(ablation_runs.subprocess, "run", started)
    timed = {"base": 1.0, "plain": 2.0, "lk": 2.0}
    monkeypatch.setattr(ablations, "cost", lambda config, name: {"ratio": timed[name], "interval": None})
    return runs


def test_variants_train_for_the_bases_time_and_once(home, in_process, capsys):
    def steps() -> dict[str, tuple[int, float]]:
        settings = [dict(override.split("=", 1) for override in run) for run in in_process]
        return {Path(s["out"]).name: (int(s["train.steps"]), float(s["optim.decay_share"])) for s in settings}

    assert call(ablations.main, *given(home, "only=[base,lk]")) == 0
    assert steps() == {"base-0": (8, 0.5), "lk-0": (4, 0.5)}  # the decay's share of the run is the base's
    assert call(ablations.main, *given(home, "seeds=[0,1]")) == 0
    names = [Path(override[4:]).name for run in in_process for override in run if override.startswith("out=")]
    assert names == ["base-0", "lk-0", "plain-0", "base-1", "plain-1", "lk-1"]
    assert steps()["plain-1"] == (4, 0)
    found = json.loads((home / "out" / "results.json").read_text())["variants"]
    assert list(found) == ["base", "lk", "plain"]
    assert found["lk"]["steps"] == 4
    assert found["lk"]["tpc_by_seed"].keys() == {"0", "1"}
    assert found["base"]["gain"] is None
    assert found["lk"]["gain"]["low"] <= found["lk"]["gain"]["tpc"] <= found["lk"]["gain"]["high"]
    assert 1.0 <= found["base"]["tpc"] < 4.0
    assert len(found["base"]["acceptance_per_depth"]) == 3
    report = (home / "out" / "report.md").read_text()
    assert "\n| lk `train.logits_loss=lk` " in capsys.readouterr().out
    assert "| lk `train.logits_loss=lk` |" in report
    before = len(in_process)
    assert call(ablations.main, *given(home, "only=[lk]", "max_tokens=11")) == 0  # asked otherwise, so run anew
    assert len(in_process) == before + 1
    assert not (home / "out" / "training" / "lk-0").exists()


@pytest.mark.parametrize(
    ("ratio", "interval", "steps"),
    [(0.9, None, 9), (0.9, (0.8, 1.1), 8), (0.9, (0.8, 0.95), 9), (2.0, (1.5, 2.5), 4), (1.1, (1.0, 1.2), 8)],
)
def test_a_step_time_within_noise_gives_as_many_steps(home, tmp_path, ratio, interval, steps):
    config = build(ablation_runs.AblationConfig, compose("ablations", given(home, f"out={tmp_path}")), "")
    ablation_runs.once(
        tmp_path / "step-lk.json", ablation_runs.timing_of(config, "lk"), lambda: {"ratio": ratio, "interval": interval}
    )
    training = ablation_runs.run_of(config, "lk", 0)["training"]
    assert training["steps"] == steps
    assert f"train.steps={steps}" in training["overrides"]


def test_a_training_is_kept_until_its_draft_has_answered(home, in_process, tmp_path, monkeypatch, capsys):
    """A run with other questions uses the same training."""
    answered, arguments = ablation_runs.answered, ["only=[base]", f"out={tmp_path}"]

    def failing(*_):
        raise UserError("an answer that cannot be")

    monkeypatch.setattr(ablation_runs, "answered", failing)
    assert call(ablations.main, *given(home, *arguments)) == 2
    assert "step 8/8" in capsys.readouterr().err
    monkeypatch.setattr(ablation_runs, "answered", answered)
    assert call(ablations.main, *given(home, *arguments, "max_tokens=11")) == 0
    assert "step " not in capsys.readouterr().err
    assert json.loads((tmp_path / "base-0.json").read_text())["tokens"] > 0
    assert not (tmp_path / "training" / "base-0").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("questions=nowhere.jsonl", "error: questions=nowhere.jsonl: no such file"),
        (
            "base=[train.steps=3]",
            "error: base: no list is read in '[train.steps=3]': texts in it with = or other marks",
        ),
        ("limit=0", "error: limit=0: must be at least 1"),
        ("max_tokens=1", "error: max_tokens=1: must be at least 2"),
        ("max_tokens=300", "error: question "),
    ],
)
def test_questions_are_checked_before_training(home, in_process, tmp_path, capsys, override, message):
    assert call(ablations.main, *given(home, f"out={tmp_path}/out", override)) == 2
    assert message in capsys.readouterr().err
    assert in_process == []


def test_steps_are_timed_in_turn_in_two_processes(home, capsys):
    values = compose("ablations", given(home))
    config = build(ablation_runs.AblationConfig, values, "")
    found = ablation_runs.cost(config, "lk")
    assert found["ratio"] == pytest.approx(found["step_s"] / found["base_s"])
    assert 0.001 < found["step_s"] < 5
    assert found["interval"] is None  # of one round
    broken = Worker(ablation_runs.train_steps, [*config.overrides("lk"), "train.unroll=0"])
    with pytest.raises(UserError, match=r"^train\.unroll=0"):
        broken.ask(1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=0", "steps=0"),
        ("seeds=[]", "seeds=[]"),
        ("only=[other]", "only=['other']: other is none of base, unroll2, "),
        ("+variants.base=[]", "variants.base"),
        ("variants.lk=['train.nothing=1']", "Could not override 'train.nothing'"),
    ],
)
def test_mistakes_are_one_line(home, capsys, override, message):
    assert call(ablations.main, *given(home, override)) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_failed_run_is_an_error(home, monkeypatch, capsys):
    monkeypatch.setattr(ablation_runs.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=2))
    assert call(ablations.main, *given(home, "only=[base]", "seeds=[7]")) == 2
    assert "error: base-7: eagle-train ended with status 2" in capsys.readouterr().err
