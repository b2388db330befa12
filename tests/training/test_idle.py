"""training/idle.py: a setting that changes nothing beside the others is told of, and no other."""

import json
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eagle_train import train
from eagle_train.cli import compose
from eagle_train.corpus.source import DataConfig
from eagle_train.drafts import planned_config
from eagle_train.settings import build
from eagle_train.training.idle import idle
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.train_config import TrainConfig
from tests.support.command_line import call, chats, save_target, train_arguments, write_jsonl
from tests.support.tiny import tiny_target

EAGLE3 = ["draft=eagle3", "draft.layers=[1,2]"]
TARGET = cache(tiny_target)  # of three layers
NO_HELDOUT = "nothing is measured where data.heldout is null"


@pytest.fixture
def root(tmp_path) -> Path:
    """A directory with chats."""
    for name in ("train", "heldout"):
        write_jsonl(tmp_path / f"{name}.jsonl", chats(3))
    return tmp_path


def told(root: Path, *overrides: str) -> list[str]:
    """What `idle` says of a run with these words."""
    paths = () if any(each.startswith("data.mix") for each in overrides) else (f"data.path={root}/train.jsonl",)
    config = compose("train", ["data=messages", *paths, *overrides])
    groups = {"train": TrainConfig, "optim": OptimConfig, "data": DataConfig}
    train_config, optim, data = (build(cls, config[group], group) for group, cls in groups.items())
    return idle(train_config, optim, data, planned_config(TARGET().config, OmegaConf.to_container(config.draft)))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["optim.momentum=0.5"], "optim.momentum=0.5: changes nothing here: it is Muon's, and optim.name is adamw"),
        (["draft.num_experts=4"], "draft.num_experts=4: changes nothing here: draft.ffn=dense has no experts"),
        (
            ["draft.attention_chunk=64"],
            "draft.attention_chunk=64: changes nothing here: no layer attends to chunks, which is draft.irope's",
        ),
        (
            ["draft.attention_chunk=64", "draft.irope=true", "draft.num_layers=1"],
            "draft.attention_chunk=64: changes nothing here: no layer attends to chunks, which is draft.irope's",
        ),
        (
            [*EAGLE3, "draft.steps=1", "draft.decay=0.5"],
            "draft.decay=0.5: changes nothing here: it learns from one pass",
        ),
        (
            ["draft=medusa", "draft.heads=1", "draft.decay=0.5"],
            "draft.decay=0.5: changes nothing here: it learns from one pass",
        ),
        (["train.eval_batches=3"], f"train.eval_batches=3: changes nothing here: {NO_HELDOUT}"),
        (["train.eval_depth=9"], f"train.eval_depth=9: changes nothing here: {NO_HELDOUT}"),
        (["train.eval_every=7"], f"train.eval_every=7: changes nothing here: {NO_HELDOUT}"),
        (["data.weight=3"], "data.weight=3.0: changes nothing here: it is of a data set in data.mix"),
        (["data.split=test"], "data.split=test: changes nothing here: files have no configs, splits or revisions"),
        (["data.name=main"], "data.name=main: changes nothing here: files have no configs, splits or revisions"),
        (
            ["data.seed=4", "data.shuffle_window=0"],
            "data.seed=4: changes nothing here: data.shuffle_window=0 keeps the data's order",
        ),
        (
            ["train.steps=10", "optim.warmup_steps=11"],
            "optim.warmup_steps=11: train.steps=10 end before the learning rate has risen to optim.lr=0.0002",
        ),
    ],
)
def test_what_changes_nothing_is_told(root, overrides, line):
    assert told(root, *overrides) == [line]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optim.name=muon", "optim.momentum=0.5"],
        ["draft.num_experts=4", "draft.ffn=moe"],
        ["draft.attention_chunk=64", "draft.irope=true"],
        [*EAGLE3, "draft.decay=0.5"],
        ["draft=medusa", "draft.decay=0.5"],
        ["train.eval_every=0"],  # and there is nothing to measure
        ["data.split=test", "data.path=OWNER/NAME"],
        ["data.seed=4"],
        ["train.steps=10", "optim.warmup_steps=10"],
        ["train.minutes=1", "optim.warmup_steps=5000"],  # how many steps that is, nobody knows yet
    ],
)
def test_what_is_read_is_not_told(root, overrides):
    assert told(root, *overrides) == []


def test_held_out_data_are_measured_and_have_splits_too(root):
    given = ["train.eval_batches=3", "train.eval_depth=9", "train.eval_every=7"]
    assert told(root, *given, f"data.heldout={root}/heldout.jsonl") == []
    assert told(root, "data.split=test", "data.heldout=OWNER/NAME") == []


def test_a_data_set_of_a_mix_is_named(root):
    mix = [f"data.mix.a.path={root}/train.jsonl", "data.mix.a.weight=2", "data.mix.b.path=OWNER/NAME"]
    options = ["data.mix.a.split=test", "data.mix.b.split=test", "data.seed=4", "data.shuffle_window=0"]
    given = ["data.path=null", *(f"+{each}" for each in [*mix, *options[:2]]), *options[2:]]
    assert told(root, *given) == [
        "data.mix.a.split=test: changes nothing here: files have no configs, splits or revisions"
    ]  # the seed says whose row is next


def test_the_quickstart_has_nothing_idle(root):
    assert told(root, "experiment=quickstart", "data.mix=null", f"data.path={root}/train.jsonl") == []


def test_a_run_and_its_plan_tell_it(root, capsys):
    save_target(root / "target")
    given = [*train_arguments(root, f"out={root}/run", "optim.momentum=0.5"), "draft.first_token=skip"]
    for plan in ("plan=true", "plan=false"):
        assert call(train.main, *given, plan) == 0
        assert "note: optim.momentum=0.5: changes nothing here" in capsys.readouterr().err
    assert json.loads((root / "run/metrics.jsonl").read_text().splitlines()[-1])["step"] == 2
