"""train.init_from: training continues from an artifact's weights, for the same target and a draft of the same shape."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle_train import export, train
from eagle_train.artifacts.format import load_draft, save_draft
from eagle_train.cli import compose, named_path
from eagle_train.distributed import ALONE
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from eagle_train.settings import build
from eagle_train.training.assembly import assemble
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.trained_draft import read_trained
from tests.support.command_line import (
    call,
    chats,
    metrics_without_times,
    read_jsonl,
    save_target,
    train_arguments,
    write_jsonl,
)
from tests.support.tiny import tiny_draft

OTHER = {  # than conf/draft says, each of it
    "num_layers": 2,
    "norms": "full",
    "first_token": "skip",
    "fc_bias": True,
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "vocab_size": 48,
    "vocabulary": list(range(1, 96, 2)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A directory with `target`, data, and the artifacts `draft`, of one layer, and `other`."""
    root = tmp_path_factory.mktemp("init_from")
    save_target(root / "target")
    write_jsonl(root / "train.jsonl", chats(40))
    write_jsonl(root / "heldout.jsonl", chats(8, seed=1))
    save(root, "draft", num_layers=1)
    save(root, "other", **OTHER)
    return root


def target_of(root: Path) -> Target:
    return load_target(TargetConfig(f"{root}/target", dtype="float32"))


def save(root: Path, name: str, seed: int = 0, **shape) -> None:
    target = target_of(root)
    save_draft(tiny_draft(target, seed, **shape), root / name, target.identity)


def refused(capsys, *arguments: str) -> str:
    """The command's error for a mistake."""
    assert call(train.main, *arguments) == 2
    return capsys.readouterr().err.strip().rpartition("error: ")[2]


@pytest.fixture(scope="module")
def losses(root) -> dict[str, float]:
    """Of the first step: of a fresh draft, and of the artifact unchanged, whose embedding scale is 1."""
    found = {}
    for name in ("fresh", "loaded"):
        given = train_arguments(root, f"out={root}/unwritten", "draft.embedding_scale=1")
        config = compose("train", [override for one in given for override in named_path(one)])
        trainer = assemble(config, build(ParallelConfig, config.parallel, "parallel"), ALONE)
        if name == "loaded":
            trainer.draft.load_state_dict(load_draft(root / "draft").state_dict())
        with trainer.lookahead.start(steps=1):
            found[name] = trainer.train_step()["loss"]
    return found


@pytest.mark.parametrize("parallel", ["single", "ddp", "fsdp2"])
def test_the_first_steps_loss_is_the_loaded_drafts(root, losses, tmp_path, parallel):
    """Whatever embedding scale it is trained with."""
    given = f"train.init_from={root}/draft"
    assert call(train.main, *train_arguments(root, f"out={tmp_path}/run", given, f"parallel={parallel}")) == 0
    assert read_trained(tmp_path / "run")[0].config["embedding_scale"] != 1
    assert metrics_without_times(tmp_path / "run")[0]["loss"] == pytest.approx(losses["loaded"], rel=1e-5)
    assert abs(losses["loaded"] / losses["fresh"] - 1) > 0.1


def test_resuming_goes_on_from_the_runs_own_checkpoint(root, tmp_path):
    shutil.copytree(root / "draft", tmp_path / "draft")
    given = ["train.save_every=2", f"train.init_from={tmp_path}/draft"]
    assert call(train.main, *train_arguments(root, f"out={tmp_path}/whole", *given, "train.steps=4")) == 0
    assert call(train.main, *train_arguments(root, f"out={tmp_path}/run", *given)) == 0
    target = target_of(root)
    save_draft(tiny_draft(target, seed=1, num_layers=1), tmp_path / "draft", target.identity)
    assert call(train.main, *train_arguments(root, f"out={tmp_path}/run", *given, "train.steps=4")) == 0
    found, whole = (load_file(tmp_path / run / "step-00000004/draft.safetensors") for run in ("run", "whole"))
    torch.testing.assert_close(found, whole, rtol=0, atol=0)
    assert [record["step"] for record in read_jsonl(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_draft_of_another_shape_is_refused_with_what_to_give(root, tmp_path, capsys):
    given = train_arguments(root, f"out={tmp_path}/run", f"train.init_from={root}/other", "draft.norms=eagle1")
    said = refused(capsys, *given)
    ours, _, needed = said.partition(f": not as train.init_from={root}/other has it; give ")
    assert {"draft.num_layers=1", "draft.norms=eagle1", "draft.fc_bias=false"} < set(shlex.split(ours))
    needed = shlex.split(needed)
    assert {one.removeprefix("draft.").partition("=")[0] for one in needed} == OTHER.keys() - {
        "first_token",
        "vocabulary",
    }
    needed.append("draft.first_token=skip")
    assert call(train.main, *given, *needed) == 0
    found = read_trained(tmp_path / "run")[0].config
    assert {name: found[name] for name in OTHER} == OTHER
    assert call(train.main, *given, *needed, "train.steps=3") == 0  # its tokens are still its own


def test_what_cannot_be_started_from(root, tmp_path, capsys):
    given = train_arguments(root, f"out={tmp_path}/run")
    nothing = f"train.init_from={tmp_path}/nothing"
    assert refused(capsys, *given, nothing).startswith(f"{nothing}: no config.json there; give a directory that")
    save_target(tmp_path / "target", seed=1)
    here = f"train.init_from={root}/draft"
    said = refused(capsys, *given, here, f"target={tmp_path}/target")
    assert said.startswith(f"{here}: made for target {root}/target (fingerprint ")
    small = call(export.main, f"checkpoint={root}/draft", f"out={tmp_path}/small", "quant=fp8")
    assert small == 0
    assert refused(capsys, *given, f"train.init_from={tmp_path}/small").startswith(
        f"train.init_from={tmp_path}/small: is quantised, fp8 (ffn); give the draft that it was made from"
    )
    assert not (tmp_path / "run").exists()


def test_a_draft_can_lose_the_first_tokens_slot(root, losses, tmp_path):
    given = [f"train.init_from={root}/draft", "draft.first_token=skip", f"out={tmp_path}/run"]
    assert call(train.main, *train_arguments(root, *given)) == 0
    loss = metrics_without_times(tmp_path / "run")[0]["loss"]
    assert 1e-4 < abs(loss / losses["loaded"] - 1) < 0.2
    assert read_trained(tmp_path / "run")[0].config["first_token"] == "skip"


def test_a_plan_knows_the_shape_without_the_artifact(root, tmp_path, capsys):
    assert call(train.main, *train_arguments(root, "plan=true", f"train.init_from={tmp_path}/nothing")) == 0
    assert "draft: " in capsys.readouterr().out
