"""train.init_from: training continues from an artifact's weights, for the same target and a draft of the same shape."""

import json
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_train import export, train
from eagle_train.artifacts.format import load_draft, save_draft
from eagle_train.cli import compose, named_path
from eagle_train.distributed import ALONE
from eagle_train.models import loading
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
from tests.support.tiny import tiny_draft, tiny_mtp

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
    return load_target(TargetConfig(f"{root}/target", dtype="float32"), "cpu")


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
    shutil.rmtree(tmp_path / "draft")  # what it began with is not needed any more
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


@pytest.mark.parametrize("plan", ["plan=true", "plan=false"])
def test_another_kind_is_told_before_the_target_is_loaded(root, tmp_path, capsys, monkeypatch, plan):
    monkeypatch.setattr(loading, "placed", lambda *_: pytest.fail("its weights are read"))
    given = [plan, f"train.init_from={root}/draft", "draft=medusa", f"out={tmp_path}/run"]
    arguments = [each for each in train_arguments(root, *given) if not each.startswith("draft.")]  # of EAGLE alone
    assert call(train.main, *arguments) == 2
    said = f"error: draft=medusa: not as train.init_from={root}/draft has it; give draft=eagle"
    assert said in capsys.readouterr().err


def test_a_plan_knows_the_shape_without_the_artifact(root, tmp_path, capsys):
    assert call(train.main, *train_arguments(root, "plan=true", f"train.init_from={tmp_path}/nothing")) == 0
    assert "draft: " in capsys.readouterr().out


def with_own_module(
    root: Path, directory: Path, modules: int = 1, **changes: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """A target with an MTP module of its own, as DeepSeek-V3's checkpoint has it, or several, and their tensors by our
    names. `changes`: of the first one's tensors, by their last names; None: left out."""
    shutil.copytree(root / "target", directory)
    draft, tensors = tiny_mtp(target_of(root), seed=3, modules=modules), load_file(directory / "model.safetensors")
    own = {f"model.layers.3.{theirs}": draft.get_parameter(ours) for theirs, ours in THEIRS.items()}
    for more in range(1, modules):
        for theirs, ours in THEIRS.items():
            place = ours.replace("layers.0.", f"layers.{more}.")
            place = place if place != ours else f"further.{more - 1}.{ours}"
            own[f"model.layers.{3 + more}.{theirs}"] = draft.get_parameter(place)
    for number in range(modules):
        own |= {f"model.layers.{3 + number}.{name}": tensors[copied] for name, copied in COPIES.items()}
    own |= {f"model.layers.3.{name}": tensor for name, tensor in changes.items()}
    tensors |= {name: tensor.clone() for name, tensor in own.items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return dict(draft.named_parameters())


BLOCK = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
BLOCK += ["input_layernorm", "post_attention_layernorm"]
THEIRS = {f"{name}.weight": f"layers.0.{name}.weight" for name in BLOCK}
THEIRS |= {"enorm.weight": "enorm.weight", "hnorm.weight": "hnorm.weight", "eh_proj.weight": "fc.weight"}
THEIRS |= {"shared_head.norm.weight": "norm.weight"}
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def for_mtp(root: Path, *overrides: str) -> list[str]:
    """Arguments of eagle-train that goes on from the target's own MTP module."""
    given = train_arguments(root, "draft=mtp", "train.init_from=target", *overrides)
    return [each for each in given if not each.startswith("draft.embedding_scale=")]


def assembled(*arguments: str) -> torch.nn.Module:
    """The draft that a run would begin with."""
    config = compose("train", [override for one in arguments for override in named_path(one)])
    return assemble(config, build(ParallelConfig, config.parallel, "parallel"), ALONE).draft


@pytest.mark.parametrize(
    ("modules", "more"),
    [(1, []), (1, ["draft.vocab_size=30"]), (2, ["draft.modules=2"])],
    ids=["whole", "part", "two modules"],
)
def test_training_goes_on_from_the_targets_own_module(root, tmp_path, modules, more):
    expected = with_own_module(root, tmp_path / "target", modules)
    given = for_mtp(root, f"out={tmp_path}/run", f"target={tmp_path}/target", *more)
    found = dict(assembled(*given).named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=0)
    assert call(train.main, *given) == 0
    saved = read_trained(tmp_path / "run")[0]
    assert saved.config["kind"] == "mtp"
    assert not torch.equal(saved.draft()["hnorm.weight"], expected["hnorm.weight"]), "it learns"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hnorm.weight": None}, "lacks model.layers.3.hnorm.weight, unlike draft=mtp; give train.init_from=null"),
        (
            {"self_attn.kv_a_proj.weight": torch.ones(2)},
            "has model.layers.3.self_attn.kv_a_proj.weight, unlike draft=mtp; give train.init_from=null",
        ),
        (
            {"shared_head.head.weight": torch.ones(96, 32)},
            "model.layers.3.shared_head.head.weight is not the target's LM head, which draft=mtp proposes with",
        ),
        ({"enorm.weight": torch.ones(31)}, "tensor enorm.weight has shape (31,), must be (32,)"),
    ],
)
def test_a_module_that_is_another_kinds_is_refused(root, tmp_path, capsys, changes, message):
    with_own_module(root, tmp_path / "target", **changes)
    given = for_mtp(root, f"out={tmp_path}/run", f"target={tmp_path}/target")
    said = refused(capsys, *given)
    assert said == f"train.init_from=target: target.path={tmp_path}/target: {message}"


def test_more_modules_than_the_target_has_are_refused(root, tmp_path, capsys):
    with_own_module(root, tmp_path / "target", 2)
    given = for_mtp(root, f"out={tmp_path}/run", f"target={tmp_path}/target", "draft.modules=3")
    said = f"train.init_from=target: target.path={tmp_path}/target: lacks model.layers.5."
    assert refused(capsys, *given).startswith(said)


def exports(*arguments: str) -> list[str]:
    return [*arguments, "layout=target", "device=cpu"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_module_is_put_back_into_its_targets_checkpoint(root, tmp_path, capsys, shards):
    with_own_module(root, tmp_path / "target")
    if shards == 2:
        split_in_two(tmp_path / "target")
    first = "self_fusion" if shards == 2 else "skip"
    given = for_mtp(root, f"out={tmp_path}/run", f"target={tmp_path}/target", f"draft.first_token={first}")
    assert call(train.main, *given) == 0
    capsys.readouterr()
    out, draft = tmp_path / "new", read_trained(tmp_path / "run")[1]
    arguments = exports(f"checkpoint={tmp_path}/run", f"target={tmp_path}/target", f"out={out}")
    assert call(export.main, *arguments) == 0
    told = capsys.readouterr().out
    assert ("note: the target has no slot for the first token" in told) == (shards == 2)
    before, after = (everything(folder) for folder in (tmp_path / "target", out))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.3.{name}" for name in THEIRS}
    assert {after[name].dtype for name in changed} == {before[name].dtype for name in changed}
    links = {file.name for file in out.iterdir() if file.is_symlink()}
    copies = {"model-00002-of-00002.safetensors"} if shards == 2 else {"model.safetensors"}
    assert links == {file.name for file in (tmp_path / "target").iterdir()} - copies
    assert f"but for {', '.join(copies)}, in which" in told
    again = dict(assembled(*for_mtp(root, f"out={tmp_path}/again", f"target={out}")).named_parameters())
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(again[name], parameter.to(before["model.layers.3.enorm.weight"].dtype).float())
    assert call(export.main, *arguments) == 2
    assert f"out={out}: exists and holds no draft; name another directory" in capsys.readouterr().err


def test_a_chain_of_modules_is_put_back(root, tmp_path):
    """Of three modules that the target has, the two that were trained."""
    with_own_module(root, tmp_path / "target", 3)
    place = f"target={tmp_path}/target"
    assert call(train.main, *for_mtp(root, f"out={tmp_path}/run", place, "draft.modules=2")) == 0
    assert call(export.main, *exports(f"checkpoint={tmp_path}/run", place, f"out={tmp_path}/new")) == 0
    before, after = (everything(tmp_path / name) for name in ("target", "new"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{number}.{name}" for number in (3, 4) for name in THEIRS}
    again = assembled(*for_mtp(root, f"out={tmp_path}/again", f"target={tmp_path}/new", "draft.modules=2"))
    for name, parameter in read_trained(tmp_path / "run")[1].named_parameters():
        torch.testing.assert_close(dict(again.named_parameters())[name], parameter.float())


def split_in_two(directory: Path) -> None:
    """The module's tensors, and some others, in a second file, with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    second = {name for name in tensors if name.startswith(("model.layers.3.", "model.norm"))}
    places = {name: f"model-0000{1 + (name in second)}-of-00002.safetensors" for name in tensors}
    for file in set(places.values()):
        save_file({name: x for name, x in tensors.items() if places[name] == file}, directory / file, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def everything(directory: Path) -> dict[str, torch.Tensor]:
    files = (load_file(file) for file in sorted(directory.glob("*.safetensors")))
    return {name: tensor for found in files for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("made", "more", "message"),
    [
        (tiny_draft, [], "layout=target: no target has a draft of draft=eagle; use layout=native"),
        (
            tiny_mtp,
            [],
            "layout=target: target.path={root}/target: has no model.layers.3.*, so no draft of its own; use",
        ),
        (partial(tiny_mtp, window=9), [], "layout=target: draft.window and draft.sink are not the target's module's"),
        (
            partial(tiny_mtp, vocab_size=3, vocabulary=[4, 5, 6]),
            [],
            "layout=target: draft.vocab_size=3: the target's module proposes from its whole vocabulary; give a draft",
        ),
        (tiny_mtp, ["quant=fp8"], "layout=target: keeps dtypes, and is not pushed; leave quant"),
        (tiny_mtp, ["license=mit"], "layout=target: keeps dtypes, and writes no model card; leave dtype,"),
        (tiny_mtp, ["dtype=float32"], "layout=target: keeps dtypes, and writes no model card; leave dtype,"),
        (tiny_mtp, ["target=null"], "layout=target: is the target's checkpoint; give target=PATH"),
    ],
)
def test_a_draft_that_has_no_place_in_the_target_is_refused(root, tmp_path, capsys, monkeypatch, made, more, message):
    """Before the target is loaded."""
    target = target_of(root)
    monkeypatch.setattr(export, "load_target", lambda *_: pytest.fail("loaded"))
    save_draft(made(target), tmp_path / "draft", target.identity)
    given = exports(f"checkpoint={tmp_path}/draft", f"target={root}/target", f"out={tmp_path}/out")
    given = [each for each in given if more != ["target=null"] or not each.startswith("target=")]
    assert call(export.main, *given, *(each for each in more if each != "target=null")) == 2
    assert message.format(root=root) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["mtp.", "model.mtp_layers.0.", "model.mtp_block.0."])
def test_a_module_in_another_place_is_told(root, tmp_path, capsys, place):
    """Qwen3-Next's, MiMo's and Ernie's."""
    shutil.copytree(root / "target", tmp_path / "target")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    own = {f"{place}norm.weight": torch.ones(32), f"{place}layers.0.mlp.up_proj.weight": torch.ones(2)}
    save_file(tensors | own, tmp_path / "target" / "model.safetensors", {"format": "pt"})
    assert refused(capsys, *for_mtp(root, f"out={tmp_path}/run", f"target={tmp_path}/target")) == (
        f"train.init_from=target: target.path={tmp_path}/target: has an MTP module under {place}*, which draft=mtp "
        "cannot take over; give train.init_from=null"
    )


def test_a_target_without_a_module(root, tmp_path, capsys):
    assert refused(capsys, *for_mtp(root, f"out={tmp_path}/run")) == (
        f"train.init_from=target: target.path={root}/target: has no model.layers.3.*, so no draft of its own; give "
        "train.init_from=null"
    )
    given = train_arguments(root, f"out={tmp_path}/run")
    assert refused(capsys, *given, "train.init_from=target") == (
        "train.init_from=target: no target has a draft of draft=eagle; give a directory that eagle-export wrote"
    )
