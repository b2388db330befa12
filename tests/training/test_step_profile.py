"""A profile of training: which steps, what is written, that the run learns the same, and the plan beside it."""

import gzip
import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from eagle_train import train
from eagle_train.hardware import low_precision
from eagle_train.models.loading import TargetConfig
from eagle_train.ops.linear import FrozenFp8Linear
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost import estimate, measured, this_machine
from eagle_train.training.cost.estimate import GIB
from eagle_train.training.cost.measured import StepPlan, beside, step_plan
from eagle_train.training.metrics import NoTracker
from eagle_train.training.step_profile import NEEDED, STAGES, STEPS, WARM_UP, StepProfile, check_long_enough
from tests.support.command_line import (
    call,
    chats,
    metrics_without_times,
    save_target,
    train_arguments,
    write_jsonl,
)
from tests.support.tiny import tiny_target, tiny_tokenizer
from tests.support.trainers import ROW, make_trainer

PLAN = StepPlan({"target": 0.1, "loss": 0.2, "draft": 0.4, "optimiser": 0.0}, {}, 10)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A directory with a target, train.jsonl and heldout.jsonl."""
    directory = tmp_path_factory.mktemp("made")
    save_target(directory / "target")
    for seed, (name, count) in enumerate({"train": 60, "heldout": 12}.items()):
        write_jsonl(directory / f"{name}.jsonl", chats(count, seed))
    return directory


@pytest.fixture
def data(made) -> Path:
    return made


def profiled(trainer) -> tuple[StepProfile, dict]:
    """Train to the end; returns the profile, closed, and what it wrote, {} where that is nothing."""
    profile = trainer.around_step = StepProfile(trainer, PLAN)
    trainer.train(NoTracker(trainer.directory, {}))
    profile.close()
    path = trainer.directory / "profile.json"
    return profile, json.loads(path.read_text()) if path.exists() else {}


def ranges(directory) -> Counter[str]:
    events = json.loads(gzip.decompress((directory / "trace.json.gz").read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_the_whole_command(made, tmp_path, capsys):
    """Two micro-batches a step. The run goes on, and learns what it would learn anyway."""
    given = [*train_arguments(made), f"train.steps={NEEDED + 1}", "optim.name=muon"]
    assert call(train.main, *given, f"out={tmp_path}/plain") == 0
    assert not (tmp_path / "plain" / "profile.json").exists()
    capsys.readouterr()
    out = tmp_path / "profiled"
    assert call(train.main, *given, f"out={out}", "profile=true") == 0
    assert metrics_without_times(out) == metrics_without_times(tmp_path / "plain")
    found, printed = json.loads((out / "profile.json").read_text()), capsys.readouterr().out
    counted = ranges(out)
    assert {name: counted[name] for name in ("data", "draft", "loss", "optimiser", "profiled")} == {
        "data": STEPS,
        "draft": 2 * STEPS,
        "loss": 2 * STEPS,
        "optimiser": STEPS,
        "profiled": 1,
    }
    assert abs(counted["target"] - 2 * STEPS) <= 2  # it runs ahead
    assert (found["steps"], found["device"]) == (STEPS, "cpu")
    assert [*found["stages"]] == [*STAGES, "rest"]
    for name in ("target", "draft", "loss", "optimiser"):
        assert found["stages"][name]["operations"] > 0
        assert found["stages"][name]["host_ms"] > 0
    assert found["provenance"]["torch"] == torch.__version__
    rows = {row["part"]: row for row in found["plan"]["seconds"]}
    assert [*rows] == ["target", "loss", "draft", "optimiser", "all"]
    for row in rows.values():
        assert row["planned"] > 0
        assert row["ratio"] == pytest.approx(row["measured"] / row["planned"])
    assert rows["draft"]["measured"] == pytest.approx(found["stages"]["draft"]["host_ms"] / 1e3)
    assert rows["all"]["measured"] == pytest.approx(found["undisturbed_ms"] / 1e3)
    assert rows["all"]["planned"] == pytest.approx(sum(row["planned"] for row in [*rows.values()][:-1]))
    for line in (f"profile: {STEPS} steps, each ", "the plan, of a step", f"  written to {out}: trace.json.gz"):
        assert line in printed
    assert "the plan, memory" not in printed  # there is none for a CPU


def test_the_steps_that_are_profiled_come_after_those_that_are_timed(tmp_path, data, clock):
    """On a clock that a step moves: 9 seconds while it warms up, then 1, profiled 100."""
    trainer = make_trainer(tmp_path, data, steps=NEEDED)
    step, number = trainer.train_step, iter(range(NEEDED))

    def slow():
        place = next(number)
        clock[0] += 9 if place < WARM_UP else 1 if place < WARM_UP + STEPS else 100
        return step()

    trainer.train_step = slow
    assert profiled(trainer)[1]["undisturbed_ms"] == pytest.approx(1000)


def test_fewer_steps_where_a_step_has_many_micro_batches(tmp_path, data):
    trainer = make_trainer(tmp_path, data, steps=WARM_UP + 2, rows=1, rows_per_step=40)
    found = profiled(trainer)[1]
    assert found["steps"] == 1
    assert ranges(tmp_path)["draft"] == 40


def test_a_run_that_ends_amid_the_profile_has_the_steps_that_were(tmp_path, data):
    found = profiled(make_trainer(tmp_path, data, steps=WARM_UP + STEPS + 1))[1]
    assert found["steps"] == ranges(tmp_path)["optimiser"] == 1


def test_a_run_that_ends_before_the_profile_says_so(tmp_path, data, caplog):
    with caplog.at_level(logging.WARNING, "eagle_train"):
        _, found = profiled(make_trainer(tmp_path, data, steps=WARM_UP + 1))
    assert found == {}
    assert "profile: the run ended before the steps to profile; it needs 9" in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["profile=true", "train.steps=8"], "train.steps=8: profile=true needs at least 9, 3 steps that warm up, 3"),
        (["profile=1"], "profile=1: must be true or false"),
    ],
)
def test_what_cannot_be_profiled_is_told_at_once(made, tmp_path, capsys, monkeypatch, given, message):
    monkeypatch.setattr(train, "job", None)
    assert call(train.main, *train_arguments(made, f"out={tmp_path}/run"), *given) == 2
    assert message in capsys.readouterr().err


def test_a_run_that_is_just_long_enough_is_not_refused():
    check_long_enough(True, NEEDED)
    check_long_enough(True, None)  # minutes
    check_long_enough(True, "many")  # which is refused elsewhere
    check_long_enough(False, 1)


FIGURES = {
    "device": "cuda",
    "undisturbed_ms": 1500.0,
    "stages": {name: {"host_ms": 1.0, "device_ms": 100.0 * place} for place, name in enumerate(STAGES, 1)},
}


def test_the_plan_beside_a_gpus_time_and_memory():
    memory = {"target's weights": 2.0 * GIB, "draft's activations": 3.0 * GIB, "CUDA": 1.0 * GIB}
    plan = StepPlan(PLAN.seconds, memory, round(2.5 * GIB))
    rows = beside(plan, FIGURES, {"target": 4 * GIB, "loss": 6 * GIB, "draft": 5 * GIB})
    assert [(row["part"], row["planned"], row["measured"]) for row in rows["seconds"]] == [
        ("target", 0.1, 0.2),
        ("loss", 0.2, 0.4),
        ("draft", 0.4, pytest.approx(0.3)),
        ("optimiser", 0.0, 0.5),
        ("all", pytest.approx(0.7), 1.5),
    ]
    assert [row["ratio"] for row in rows["seconds"]] == pytest.approx([2, 2, 0.75, None, 1.5 / 0.7])
    assert [(row["part"], row["planned"] / GIB, row["measured"] / GIB) for row in rows["bytes"]] == [
        ("target's weights", 2, 2.5),
        ("all else", 3, 3.5),
        ("all, without CUDA's own", 5, 6),
    ]
    lines = measured.text(rows, side_by_side=False).splitlines()
    assert lines[1].split() == ["target", "100.00", "200.00", "2.00"]
    assert lines[4].split() == ["optimiser", "none", "500.00"]
    assert lines[-1].split() == ["all,", "without", "CUDA's", "own", "5.0", "GiB", "6.0", "GiB", "1.20"]
    assert "half of them" in measured.text(rows, side_by_side=True)


def test_a_cpus_plan_has_no_memory_and_its_time_is_the_hosts():
    rows = beside(PLAN, {**FIGURES, "device": "cpu"}, {})
    assert [row["measured"] for row in rows["seconds"]] == pytest.approx([0.001] * 4 + [1.5])
    assert rows["bytes"] == []


def test_the_plan_by_part_is_that_of_a_step_in_sum(tmp_path, data, monkeypatch):
    """At 1 GFLOP/s, of which a step reaches a share; a GPU's memory is planned as `plan=true` does."""
    monkeypatch.setattr(this_machine, "measured_speed", lambda device, dtype: 1e9)
    trainer = make_trainer(tmp_path, data, optim={"name": "muon"})
    plan = step_plan(trainer, TargetConfig("t"), ParallelConfig())
    assert plan.memory == {}
    model = trainer.target.model
    assert plan.weights == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    monkeypatch.setattr(measured, "device_memory", lambda device: 80 * GIB)
    on_gpu = step_plan(trainer, TargetConfig("t"), ParallelConfig())
    assert on_gpu.memory["target's weights"] == pytest.approx(plan.weights, rel=1e-3)
    flops = {part: each * this_machine._REACH * 1e9 for part, each in plan.seconds.items()}
    assert all(each > 0 for each in flops.values())
    of_tokens = sum(flops.values()) - flops["optimiser"]
    whole = this_machine.step_flops(of_tokens / (4 * ROW), trainer.draft.config, trainer.optim, low_precision("cpu"))
    assert sum(flops.values()) == pytest.approx(whole)


def test_the_plan_by_part_of_a_target_in_fp8_is_half_of_it_where_the_device_has_fp8(tmp_path, data, monkeypatch):
    """But for its attention, as `plan=true` counts it; a device without takes as long as in bf16."""
    monkeypatch.setattr(this_machine, "measured_speed", lambda device, dtype: 1e9)
    trainers = [make_trainer(tmp_path / quant, data, target_quant=quant) for quant in ("none", "fp8")]
    whole, emulated = (step_plan(each, TargetConfig("t"), ParallelConfig()).seconds for each in trainers)
    monkeypatch.setattr(estimate, "computes_fp8", lambda device: True)
    computed = step_plan(trainers[1], TargetConfig("t"), ParallelConfig()).seconds
    assert emulated == whole
    assert 0.5 < computed["target"] / whole["target"] < 0.6
    assert {**computed, "target": 0} == {**whole, "target": 0}


def test_the_weights_of_a_target_in_fp8_are_there(tmp_path, data):
    """Their codes, which are no parameters, in place of those that were rounded."""
    target = tiny_target(tokenizer=tiny_tokenizer(), num_hidden_layers=2)
    whole = step_plan(make_trainer(tmp_path, data, target=target), TargetConfig("t"), ParallelConfig()).weights
    target.round_to_fp8()
    weights = step_plan(make_trainer(tmp_path, data, target=target), TargetConfig("t"), ParallelConfig()).weights
    rounded = [each for each in target.model.modules() if isinstance(each, FrozenFp8Linear)]
    assert whole - weights == sum(3 * each.codes.nbytes - each.scales.nbytes for each in rounded) > 0
