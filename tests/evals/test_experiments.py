"""evals.experiments: steps by the ratio of times, results that are made once; the whole command on tiny models."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from eagle_train import train
from eagle_train.cli import as_overrides, compose
from eagle_train.drafts import Draft
from eagle_train.errors import UserError
from eagle_train.inference import Eagle, SamplingParams
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.models.draft_quantisation import quant_of
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from eagle_train.settings import CONF_DIR, build
from evals import experiments
from evals.bench import statistics, study_answers, study_plan, study_runs
from evals.bench.contexts import acceptance
from evals.bench.study import StudyConfig, Trained
from evals.bench.worker import Worker
from tests.support.command_line import call, chats, write_jsonl
from tests.support.eval_inputs import make_home

STUDIES = sorted(path.stem for path in (CONF_DIR / "study").glob("*.yaml"))


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = make_home(tmp_path_factory.mktemp("experiments"))
    write_jsonl(home / "chats.jsonl", chats(40))
    return home


def given(home: Path, *overrides: str) -> list[str]:
    """The command's arguments for two variants of a run on the tiny target."""
    base = [
        *(f"target={home}/target", "data=messages", f"data.path={home}/chats.jsonl", "data.row_tokens=64"),
        *("train.micro_batch_rows=1", "optim.tokens_per_step=64", "draft.num_layers=1"),
        *("train.steps=100", "optim.decay_share=0.5"),
    ]
    variants = ["+study.variants.plain=['optim.decay_share=0']", "only=[base,plain,lk]", "seeds=[0]"]
    sizes = ["study.steps=[8]", "rounds=1", "timed_steps=1", "max_tokens=12", "batch_size=2", "device=cpu"]
    paths = [f"questions={home}/questions.jsonl", f"out={home}/out", "timed_questions=0"]
    quoted = ",".join(f"'{override}'" for override in base)
    return [f"study.base=[{quoted}]", *variants, *sizes, *paths, *overrides]


@pytest.fixture
def in_process(monkeypatch) -> list[list[str]]:
    """Training runs in this process; its overrides are recorded. A variant's step takes twice as long as the base's."""
    runs = []

    def started(command: list[str], **_) -> SimpleNamespace:
        runs.append(command[3:])
        return SimpleNamespace(returncode=train.job(compose("train", as_overrides("train", command[3:]))))

    # Of this module alone: Python's own, as platform.processor, start processes too.
    monkeypatch.setattr(study_runs, "subprocess", SimpleNamespace(run=started))
    timed = {"base": 1.0, "plain": 2.0, "lk": 2.0}

    def cost(config: StudyConfig, name: str) -> dict:
        return {"ratio": timed[name], "interval": None, "reference_s": 1.0, "step_s": timed[name]}

    monkeypatch.setattr(study_runs, "cost", cost)
    monkeypatch.setattr(study_plan, "step_seconds", lambda config: 1.0)
    return runs


def results(home: Path) -> dict:
    return json.loads((home / "out" / "results.json").read_text())


@pytest.mark.usefixtures("few")
def test_variants_train_for_the_references_time_and_once(home, in_process, capsys):
    def steps() -> dict[str, tuple[int, float]]:
        settings = [dict(override.split("=", 1) for override in run) for run in in_process]
        return {Path(s["out"]).name: (int(s["train.steps"]), float(s["optim.decay_share"])) for s in settings}

    assert call(experiments.main, *given(home, "only=[lk]")) == 0  # the reference takes part
    assert steps() == {"base-8-0": (8, 0.5), "lk-4-0": (4, 0.5)}  # the decay's share of the run is the base's
    assert "2 trainings left, " in capsys.readouterr().out
    assert call(experiments.main, *given(home, "seeds=[0,1]")) == 0
    names = [Path(override[4:]).name for run in in_process for override in run if override.startswith("out=")]
    assert names == ["base-8-0", "lk-4-0", "plain-4-0", "base-8-1", "lk-4-1", "plain-4-1"]
    assert steps()["plain-4-1"] == (4, 0)
    (part,) = results(home)["parts"]
    assert (part["steps"], part["equal"], list(part["variants"])) == (8, "time", ["base", "lk", "plain"])
    base, lk = part["variants"]["base"], part["variants"]["lk"]
    assert lk["steps"] == 4
    assert len(lk["tpc_by_seed"]["chain3"]) == 2
    assert base["gain"]["chain3"]["tpc"] == 0
    for figure in (lk["gain"]["chain3"], lk["tpc"]["chain3"]):
        assert figure["low"] <= figure["tpc"] <= figure["high"]
    assert 1.0 <= base["tpc"]["chain3"]["tpc"] < 4.0
    assert len(base["acceptance_per_depth"]["chain3"]) == 3
    kept = [json.loads((home / f"out/lk-4-{seed}-chain3.json").read_text()) for seed in (0, 1)]
    calls = sum(calls for one in kept for _, calls in one["answers"])
    assert sum(row["rounds"] for row in lk["by_context"]["chain3"]) == calls  # of both seeds
    report = (home / "out" / "report.md").read_text()
    assert "With chain3, all seeds together:" in report
    assert "\n| lk " in capsys.readouterr().out
    assert "| lk `train.logits_loss=lk` |" in report
    before = len(in_process)
    kept[1]["contexts"][0]["drafts"] = [[3, 3, calls]]  # as if the other seed's drafts were all accepted
    (home / "out/lk-4-1-chain3.json").write_text(json.dumps(kept[1]))
    assert call(experiments.main, *given(home, "seeds=[0,1]")) == 0
    lk = results(home)["parts"][0]["variants"]["lk"]
    assert lk["acceptance_per_depth"]["chain3"] == acceptance([one["contexts"] for one in kept])
    assert (
        call(experiments.main, *given(home, "only=[lk]", "max_tokens=11")) == 0
    )  # asked otherwise, by the same drafts
    assert len(in_process) == before
    assert not (home / "out" / "training").exists()


@pytest.mark.usefixtures("noisy")
def test_trees_tokens_and_speed(home, in_process, tmp_path):
    """A variant at equal tokens makes as many steps; each draft decodes with each tree; all are timed in turn."""
    tree = "{_target_: eagle_train.inference.decode.row_trees.dynamic, nodes: 4, depth: 2, top_k: 2}"
    asked = ["only=[lk]", "study.equal=[time,tokens]", "~study.trees.chain3"]
    asked += ["+study.trees.chain2=chain2", f"+study.trees.grown={tree}"]
    more = ["study.steps=[2,6]", "timed_questions=2", f"out={tmp_path}/out", "max_tokens=24"]
    assert call(experiments.main, *given(home, *asked, *more)) == 0
    found = results(tmp_path)
    runs = [(part["steps"], part["equal"], part["variants"]["lk"]["steps"]) for part in found["parts"]]
    assert runs == [(2, "time", 1), (2, "tokens", 2), (6, "time", 3), (6, "tokens", 6)]
    trained = [Path(override[4:]).name for run in in_process for override in run if override.startswith("out=")]
    assert trained == ["base-2-0", "lk-1-0", "lk-2-0", "base-6-0", "lk-3-0", "lk-6-0"]
    for name in ("base", "lk"):
        for own in found["speedups"][name].values():
            assert own["speedup"] > 0
            assert own["differing_answers"] == 0
    last = found["parts"][-1]["variants"]["lk"]
    assert last["tpc"].keys() == {"chain2", "grown"}
    assert (tmp_path / "out" / "tpc.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            ["+study.variants.heads=['draft=medusa','draft.heads=2','draft.num_layers=1']", "only=[heads]"],
            "error: study.trees.chain3=chain3: has 3 levels, and the drafts of heads propose 2; give fewer",
        ),
        (
            ["study.decoding={base: {quant: {scheme: int4}}}", "only=[lk]"],
            "error: study.decoding.base.quant=int4 (ffn): layers.0.mlp.gate_proj of the draft has 64 outputs and 32 ",
        ),
    ],
    ids=["too deep a tree", "no shape for INT4"],
)
def test_what_a_draft_cannot_do_is_refused_before_training(
    home, in_process, tmp_path, capsys, monkeypatch, asked, said
):
    """And before the target's weights are read."""
    monkeypatch.setattr(experiments, "load_target", None)
    assert call(experiments.main, *given(home, *asked, f"out={tmp_path}/out")) == 2
    assert said in capsys.readouterr().err
    assert in_process == []


SAMPLED = {"temperature": 1, "drafting": "multinomial"}


@pytest.mark.usefixtures("noisy", "few")
def test_variants_of_decoding_share_a_draft(home, in_process, tmp_path, capsys):
    """Trained once, also where the reference is not the first; each answers as it decodes, and is timed."""
    names = "study.variants={exact: [], last: [], drawn: [], alike: []}"
    drawn = "{temperature: 1, drafting: multinomial, repetition_penalty: 1.5}"
    asked = [names, f"study.decoding={{last: {{alignment: last}}, drawn: {drawn}}}", "presence_penalty=0.5"]
    asked += ["study.reference=exact", "only=[last,drawn,alike]", f"out={tmp_path}", "timed_questions=1"]
    assert call(experiments.main, *given(home, *asked)) == 0
    assert [path.name for path in (tmp_path / "drafts").iterdir()] == ["base-8-0"]
    assert len(in_process) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    variants = found["parts"][0]["variants"]
    assert variants["alike"]["gain"]["chain3"] == {"tpc": 0, "low": 0, "high": 0}
    answers = {name: json.loads((tmp_path / f"{name}-8-0-chain3.json").read_text()) for name in variants}
    assert answers["alike"]["answers"] == answers["exact"]["answers"]
    assert answers["drawn"]["answers"] != answers["exact"]["answers"]
    assert answers["drawn"]["asked"]["decoding"]["drafting"] == "multinomial"
    assert found["speedups"].keys() == variants.keys()
    report = (tmp_path / "report.md").read_text()
    assert "; temperature 0, presence penalty 0.5 unless a variant says otherwise." in report
    assert "| last `presence_penalty=0.5` `alignment=last` `quant=none (ffn)` |" in report
    penalties = "`repetition_penalty=1.5` `presence_penalty=0.5`"
    assert f"| drawn `temperature=1.0` `top_p=0.9` {penalties} `drafting=multinomial` " in report


def test_a_study_is_chosen_by_its_group(home, capsys):
    """`study.name` would run the default study under the other's name."""
    assert call(experiments.main, *given(home, "name=length")) == 2
    assert "error: name=length: no such key; did you mean study=length? (" in capsys.readouterr().err


def test_engines_decode_as_variants_do(home, tmp_path, monkeypatch):
    made = []

    def recorded(draft: Draft, target: Target, alignment: str) -> Eagle:
        made.append((alignment, str(quant_of(draft))))
        return drafter_of(draft, target, alignment)

    monkeypatch.setattr(study_answers, "drafter_of", recorded)
    decoding = {"base": {"alignment": "last", "quant": {"scheme": "fp8", "scope": "all_linear"}}, "lk": SAMPLED}
    values = compose("experiments", given(home, f"draft.path={home}/draft", "only=[base]"))
    OmegaConf.update(values, "study.decoding", decoding, force_add=True)
    config = build(StudyConfig, values, "")
    target = load_target(TargetConfig(path=str(home / "target")), torch.device("cpu"))
    engines = [
        study_answers.engine_of(config, Trained(name, 8, None), "chain3", target, 2, 64) for name in ("base", "lk")
    ]
    assert made == [("last", "fp8 (all_linear)"), ("accepted", "none")]
    assert [engine.config.drafting for engine in engines] == ["greedy", "multinomial"]
    assert [config.sampling(name).temperature for name in ("base", "lk")] == [0, 1]


def test_a_variant_samples_as_the_command_says_but_for_its_own_keys(home):
    decoding = {"lk": {"temperature": 1, "logit_bias": {5: 2}}}
    values = compose("experiments", given(home, "temperature=0.5", "min_p=0.1", "presence_penalty=0.5"))
    OmegaConf.update(values, "study.decoding", decoding, force_add=True)
    config = build(StudyConfig, values, "")
    shared = SamplingParams(0.5, 0.9, min_p=0.1, presence_penalty=0.5, max_tokens=12)
    assert config.sampling("base") == shared
    assert config.sampling("lk") == replace(shared, temperature=1.0, logit_bias={5: 2.0})
    asked = asdict(config.decoding("lk"))
    assert json.loads(json.dumps(asked)) == asked, "results are kept as JSON, with what they follow from"


@pytest.mark.usefixtures("few")
def test_a_draft_that_is_given_is_not_trained(home, in_process, tmp_path, capsys):
    asked = ["only=[base]", f"out={tmp_path}/out", f"draft={home}/draft", "+study.trees.chain1=chain1", "seeds=[0,1]"]
    assert call(experiments.main, *given(home, *asked)) == 0
    assert in_process == []
    found = results(tmp_path)
    (part,) = found["parts"]
    base = part["variants"]["base"]
    assert base["seeds"] == [0]
    assert base["gain_over_first_tree"]["chain3"] == {"tpc": 0, "low": 0, "high": 0}
    gain = base["gain_over_first_tree"]["chain1"]
    assert gain["tpc"] == pytest.approx(base["tpc"]["chain1"]["tpc"] - base["tpc"]["chain3"]["tpc"])
    assert gain["low"] <= gain["tpc"] <= gain["high"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| TPC above chain3, the draft as given |" in report
    capsys.readouterr()
    assert call(experiments.main, *given(home, f"draft={home}/draft", "only=[lk]", f"out={tmp_path}/out")) == 2
    assert f"error: draft={home}/draft: lk is trained otherwise (train.logits_loss=lk)" in capsys.readouterr().err


def test_of_a_draft_that_is_given_its_own_shape_counts(home, in_process, tmp_path, capsys):
    """A chain of three is too deep for the heads that the study would train, and not for the draft."""
    heads = "study.variants={base: ['draft=medusa', 'draft.heads=2', 'draft.num_layers=1']}"
    asked = [heads, "only=[base]", f"draft={home}/draft", f"out={tmp_path}/out", "plan=true"]
    assert call(experiments.main, *given(home, *asked)) == 0
    assert "1 times 3 answers: " in capsys.readouterr().out


def test_a_plan_trains_nothing_and_counts_what_is_left(home, in_process, tmp_path, capsys):
    def planned(*more: str) -> dict[str, float]:
        assert call(experiments.main, *given(home, f"out={tmp_path}", "plan=true", "timed_questions=9", *more)) == 0
        lines = [line.rsplit(": ", 1) for line in capsys.readouterr().out.splitlines()]
        unit = {"s": 1, "min": 60, "hours": 3600}
        return {what: float(said.split()[0]) * unit[said.split()[1]] for what, said in lines}

    assert planned(f"out={tmp_path}/plan")
    assert not (tmp_path / "plan").exists()
    before = planned()
    assert in_process == []
    names = ["time of a step of 3 variants", "3 drafts", "3 times 3 answers", "4 times 3 answers, one by one", "all"]
    assert list(before) == names
    assert before["3 drafts"] == pytest.approx(3 * (8 + study_plan.STARTING_S), abs=3.6)
    assert call(experiments.main, *given(home, f"out={tmp_path}", "only=[lk]", "timed_questions=9")) == 0
    capsys.readouterr()
    assert planned("only=[lk]") == {"all": 0}
    assert list(planned()) == ["time of a step of 1 variants", "1 drafts", "1 times 3 answers", *names[3:]]


@pytest.mark.parametrize("study", STUDIES)
def test_the_studies_of_the_project_hold(study):
    """Every variant's overrides are eagle-train's, and every tree is one."""
    config = build(StudyConfig, compose("experiments", [f"study={study}"]), "")
    assert config.study.name == study
    for name in config.chosen:
        compose("train", config.overrides(name))


@pytest.mark.parametrize(
    ("ratio", "interval", "equal", "steps"),
    [
        (0.9, None, "time", 9),
        (0.9, (0.8, 1.1), "time", 8),
        (0.9, (0.8, 0.95), "time", 9),
        (2.0, (1.5, 2.5), "time", 4),
        (1.1, (1.0, 1.2), "time", 8),
        (2.0, (1.5, 2.5), "tokens", 8),
    ],
)
def test_a_step_time_within_noise_gives_as_many_steps(home, ratio, interval, equal, steps):
    config = build(StudyConfig, compose("experiments", given(home)), "")
    own = config.own_steps(8, equal, {"ratio": ratio, "interval": interval})
    assert own == steps
    asked = study_runs.training_asked(config, Trained("lk", own, 3))
    assert asked["overrides"][-3:] == ["seed=3", "data.seed=3", f"train.steps={steps}"]


def test_a_draft_is_kept_for_other_answers(home, in_process, tmp_path, monkeypatch, capsys):
    """A run with other questions uses the same training, also after one that failed."""
    answered, arguments = study_answers.answered, ["only=[base]", f"out={tmp_path}"]

    def failing(*_):
        raise UserError("an answer that cannot be")

    monkeypatch.setattr(study_answers, "answered", failing)
    assert call(experiments.main, *given(home, *arguments)) == 2
    assert "step 8/8" in capsys.readouterr().err
    monkeypatch.setattr(study_answers, "answered", answered)
    assert call(experiments.main, *given(home, *arguments, "max_tokens=11")) == 0
    assert "step " not in capsys.readouterr().err
    assert json.loads((tmp_path / "base-8-0.json").read_text())["tokens"] > 0
    file = tmp_path / "base-8-0-chain3.json"  # of a version that did not count loops
    before = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in before.items() if key != "looping_answers"}))
    assert call(experiments.main, *given(home, *arguments, "max_tokens=11")) == 0
    assert json.loads(file.read_text())["looping_answers"] == before["looping_answers"]
    assert "1 times 3 answers" in capsys.readouterr().out


def test_results_are_of_the_questions_and_the_target_that_are_there(home, in_process, tmp_path, capsys):
    """Others under the same names are asked again, and another target's draft is trained again."""
    questions, target = tmp_path / "questions.jsonl", Path(shutil.copytree(home / "target", tmp_path / "target"))
    shutil.copy(home / "questions.jsonl", questions)
    arguments = given(home, "only=[base]", f"out={tmp_path}/out", f"questions={questions}")
    arguments[0] = arguments[0].replace(f"target={home}/target", f"target={target}")

    def run(told: str) -> int:
        assert call(experiments.main, *arguments, "plan=true") == 0
        assert told in " ".join(capsys.readouterr().out.split())
        assert call(experiments.main, *arguments) == 0
        capsys.readouterr()
        return len(in_process)

    assert run("1 drafts: ") == 1
    before = json.loads((tmp_path / "out/base-8-0-chain3.json").read_text())["answers"]
    assert len(before) == 3, "one of each question, over its turns"
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    write_jsonl(questions, [rows[0] | {"turns": ["Something else?"]}, *rows[1:]])
    assert run("1 times 3 answers: ") == 1
    assert json.loads((tmp_path / "out/base-8-0-chain3.json").read_text())["answers"] != before
    weights = load_file(target / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.up_proj.weight"))
    save_file(weights | {name: weights[name] * 1.5}, target / "model.safetensors", {"format": "pt"})
    assert run("1 drafts: ") == 2


def test_a_timing_that_cannot_be_right_costs_no_other_result(home, in_process, tmp_path, monkeypatch, capsys):
    def measured(plain, other, max_tokens):
        return {"speedup": 9.0, "speedup_batch_median": 9.0, "differing_answers": 0}

    arguments = given(home, "only=[base]", f"out={tmp_path}/out", "timed_questions=1")
    with monkeypatch.context() as patched:
        patched.setattr(statistics, "compare", measured)
        assert call(experiments.main, *arguments) == 2
    assert "error: base, chain3: speed-up 9.000 exceeds" in capsys.readouterr().err
    found = results(tmp_path)
    assert (found["speedups"], len(found["left_out"])) == ({"base": {"chain3": None}}, 1)
    assert "Speed-up over plain decoding" in (tmp_path / "out/report.md").read_text()
    monkeypatch.setattr(statistics, "check_timing", lambda found: None)
    assert call(experiments.main, *arguments) == 0
    assert results(tmp_path)["speedups"]["base"]["chain3"]["speedup"] > 0
    assert len(in_process) == 1


@pytest.mark.usefixtures("noisy")
def test_a_draft_that_was_removed_is_trained_again_where_it_is_needed(home, in_process, tmp_path, capsys):
    """For other answers, and for the speed-up; not where all is there."""
    arguments = ["only=[base]", f"out={tmp_path}"]
    for more, trainings, left in (
        ([], 1, True),
        ([], 1, False),
        (["max_tokens=11"], 2, True),
        (["max_tokens=11", "timed_questions=1"], 3, True),
    ):
        assert call(experiments.main, *given(home, *arguments, *more, "plan=true")) == 0
        assert ("1 drafts: " in capsys.readouterr().out) == left
        assert call(experiments.main, *given(home, *arguments, *more)) == 0
        assert len(in_process) == trainings
        capsys.readouterr()
        shutil.rmtree(tmp_path / "drafts", ignore_errors=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("questions=nowhere.jsonl", "error: questions=nowhere.jsonl: no such file"),
        (
            "study.base=[train.steps=3]",
            "error: study.base: no list is read in '[train.steps=3]': texts in it with = or other marks",
        ),
        ("limit=0", "error: limit=0: must be at least 1"),
        ("max_tokens=1", "error: max_tokens=1: must be at least 2"),
        ("max_tokens=300", "error: question "),
    ],
)
def test_questions_are_checked_before_training(home, in_process, tmp_path, capsys, override, message):
    assert call(experiments.main, *given(home, f"out={tmp_path}/out", override)) == 2
    assert message in capsys.readouterr().err
    assert in_process == []


def test_steps_are_timed_in_turn_in_two_processes(home, capsys):
    values = compose("experiments", given(home))
    config = build(StudyConfig, values, "")
    found = study_runs.cost(config, "lk")
    assert found["ratio"] == pytest.approx(found["step_s"] / found["reference_s"])
    assert 0.001 < found["step_s"] < 5
    assert found["interval"] is None  # of one round
    assert study_plan.step_seconds(config) > 0.001
    broken = Worker(study_runs.train_steps, [*config.overrides("lk"), "train.unroll=0"])
    with pytest.raises(UserError, match=r"^train\.unroll=0"):
        broken.ask(1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("study.steps=[0]", "study.steps=[0]"),
        ("target=me/target", "target=me/target: no such key"),
        ("study.equal=[loss]", "study.equal=['loss']: must be a list of time and tokens"),
        ("+study.trees.a=chain0", "study.trees.a=chain0: drafts nothing"),
        ("study.reference=other", "study.reference=other: is none of base, unroll2, "),
        ("seeds=[]", "seeds=[]"),
        ("only=[other]", "only=['other']: other is none of base, unroll2, "),
        ("study.variants.lk=['train.nothing=1']", "train.nothing=1: no such key"),
        (
            "study.variants.lk=[draft.heads=1]",
            "study.variants.lk: no list is read in '[draft.heads=1]': texts in it with = or other marks stand",
        ),
        ("+study.variants=4", "+study.variants=4: the key is there already; give study.variants=4"),
        ("+study.decoding={other: {}}", "study.decoding.other: is none of the variants base, unroll2, "),
        ("+study.decoding={lk: {drafting: multinomial}}", "study.decoding.lk.drafting=multinomial: changes nothing at"),
        ("+study.decoding={lk: {quant: {scheme: int3}}}", "quant.scheme=int3: must be one of none, "),
        ("+study.decoding={lk: {min_p: 2}}", "study.decoding.lk.min_p=2.0: must be from 0 (off) to 1"),
        (
            "+study.decoding={lk: {min_tokens: 13}}",
            "study.decoding.lk.min_tokens=13: must be at most max_tokens",
        ),
        ("+study.decoding={lk: {topp: 1}}", "study.decoding.lk.topp: no such key; did you mean top_p?"),
        ("+study.decoding={lk: 4}", "study.decoding.lk=4: must be a mapping of keys to values"),
        ("temperature=-1", "temperature=-1.0: must be 0 or more, and finite"),
        ("min_tokens=13", "min_tokens=13: must be at most max_tokens, which is 12"),
        (
            "study.name=length",
            "study.name=length: is another study than options, which would run",
        ),
    ],
)
def test_mistakes_are_one_line(home, capsys, override, message):
    assert call(experiments.main, *given(home, override)) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_failed_run_is_an_error(home, monkeypatch, capsys):
    monkeypatch.setattr(study_runs, "subprocess", SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=2)))
    monkeypatch.setattr(study_runs, "cost", lambda *_: {"ratio": 1.0, "interval": None, "step_s": 1.0})
    monkeypatch.setattr(study_plan, "step_seconds", lambda config: 1.0)
    assert call(experiments.main, *given(home, "only=[base]", "seeds=[7]", f"out={home}/failed")) == 2
    assert "error: base-8-7: eagle-train ended with status 2" in capsys.readouterr().err
