"""Drafts of others: what is wrong with their files, and what is no fault but a format that we do not run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_train.errors import UserError
from tests.support.doctor_models import PLACE
from tests.support.planted import causes, edited, examined, exported, rewritten

FEW = {"limit": 6, "max_tokens": 16}


def foreign(place: Path, name: str, layout: str, **config) -> Path:
    """A draft as others publish it, without our description."""

    def change(values: dict) -> None:
        del values["eagle_train"]
        values |= config

    return edited(exported(place, name, layout), change)


def other_embedding(tensors: dict) -> None:
    tensors["embed_tokens.weight"] = torch.randn(len(tensors["t2d"]), 64)


def little_trained(tensors: dict) -> None:
    own = tensors["embed_tokens.weight"].float()
    tensors["embed_tokens.weight"] = own + 1e-3 * own.norm() / own.numel() ** 0.5 * torch.randn(own.shape)


@pytest.mark.parametrize("trained", [True, False])
def test_a_trained_embedding_is_no_fault(tmp_path, trained):
    """Nothing is wrong with it, but our drafts have none. Where the file does not say so, it is another target's."""
    place = foreign(tmp_path / "draft", "eagle3", "speculators", embed_requires_grad=trained)
    rewritten(place, other_embedding)
    if trained:
        with pytest.raises(UserError, match=r"^draft=.*: has an embedding of its own \(trained\), which our drafts do"):
            examined(place)
    else:
        assert causes(examined(place)) == ["target"]


def with_norm(tensors: dict) -> None:
    tensors["embedding_layernorm.weight"] = torch.ones(64)


def in_few_bits(tensors: dict) -> None:
    weight = tensors.pop("fc.weight")
    tensors |= {"fc.weight_packed": weight.to(torch.int32), "fc.weight_scale": torch.full((64, 1), float("inf"))}


def same(tensors: dict) -> None:
    """No change."""


NOT_READ: dict[str, tuple[dict, Callable, str]] = {
    "DFlash": ({"architectures": ["DFlashDraftModel"]}, same, "is a DFlash draft; "),
    "MTP": ({"architectures": ["DeepSeekMTPModel"]}, same, "is an MTP module; "),
    "quantised": ({"quantization_config": {"bits": 4}}, same, "is quantised; give the unquantised draft"),
    "packed": ({}, in_few_bits, "is quantised; give the unquantised draft"),  # though a scale is infinite
    "gelu": ({"hidden_act": "gelu"}, same, "hidden_act is 'gelu' in config.json, and must be silu"),
    "norm": ({}, with_norm, r"has a norm after the embedding \(layernorms\), which our drafts do not have"),
    "width": ({"hidden_size": 128}, same, "config.json: hidden_size is 128, and 64 in target "),
    "vocabulary": ({"vocab_size": 4096}, same, "config.json: vocab_size is 4096, and "),
    "a model": ({"architectures": ["LlamaForCausalLM"]}, lambda tensors: tensors.pop("fc.weight"), "no EAGLE draft"),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_we_do_not_run_is_no_finding(tmp_path, name):
    config, change, said = NOT_READ[name]
    place = rewritten(foreign(tmp_path / "draft", "eagle", "vllm", **config), change)
    with pytest.raises(UserError, match=rf"^draft=[^\n]*{said}"):
        examined(place)


def test_heads_of_another_size_are_no_finding(tmp_path):
    tensors = {"0.0.linear.weight": torch.zeros(128, 128), "0.0.linear.bias": torch.zeros(128)}
    tensors |= {"0.1.weight": torch.zeros(300, 128)}
    save_file(tensors, tmp_path / "medusa_lm_head.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"^draft=.*: hidden_size is 128, and 64 in target "):
        examined(tmp_path)


def lost(tensors: dict) -> None:
    del tensors["layers.0.mlp.up_proj.weight"]


def narrow(tensors: dict) -> None:
    tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"][:-1]


def without_fc(tensors: dict) -> None:
    del tensors["fc.weight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [(lost, "up_proj.weight is missing"), (narrow, "up_proj.weight has shape"), (without_fc, "has no fc.weight")],
)
def test_a_tensor_that_does_not_fit_is_a_finding(tmp_path, change, said):
    place = foreign(tmp_path / "draft", "eagle", "vllm", architectures=["EagleLlamaForCausalLM"])
    found = examined(rewritten(place, change))
    assert causes(found) == ["tensor"]
    assert said in found.findings[0].measured


@pytest.mark.parametrize("change", ["fine-tuned", "LM head", "scaled"])
def test_what_a_file_repeats_of_another_target(tmp_path, change):
    place = foreign(tmp_path / "draft", "eagle", "trtllm")
    changes: dict[str, Callable] = {
        "fine-tuned": little_trained,
        "LM head": lambda tensors: tensors.update({"lm_head.weight": tensors["embed_tokens.weight"] + 1}),
        "scaled": lambda tensors: tensors["embed_tokens.weight"].mul_(8),
    }
    found = examined(rewritten(place, changes[change]))
    assert causes(found) == ["embedding" if change == "scaled" else "target"]
    (reason,) = [each.reason for each in found.not_checked if each.check == "all that runs the draft"]
    assert "it is for another target, or has an" in reason


def sharded(place: Path) -> None:
    """Two files and their index."""
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    parts, names = {"a.safetensors": {}, "b.safetensors": {}}, sorted(tensors)
    for number, name in enumerate(names):
        parts["ab"[number % 2] + ".safetensors"][name] = tensors[name]
    for file, part in parts.items():
        save_file(part, place / file)
    index = {name: file for file, part in parts.items() for name in part}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def pickled(place: Path) -> None:
    """As EAGLE's own repository has them, of a model that was trained on several GPUs."""
    tensors = {f"module.{name}": tensor for name, tensor in load_file(place / "model.safetensors").items()}
    (place / "model.safetensors").unlink()
    torch.save(tensors, place / "pytorch_model.bin")


@pytest.mark.parametrize("packed", [sharded, pickled])
def test_files_of_every_form_are_looked_at(tmp_path, packed):
    """Here a map that says other tokens than its inverse, and zeros."""

    def change(tensors: dict) -> None:
        tensors["t2d"] = ~tensors["t2d"]
        tensors["layers.0.mlp.up_proj.weight"].zero_()

    place = rewritten(foreign(tmp_path / "draft", "eagle3", "speculators"), change)
    packed(place)
    found = examined(place, **FEW)
    assert causes(found)[:2] == ["tensor", "vocabulary"]
    assert "layers.0.mlp.up_proj.weight [128, 64] is zero throughout" in found.findings[0].measured


@pytest.mark.parametrize(("stated", "told"), [(32, True), (256, False), (None, False)])
def test_a_context_that_is_shorter_than_the_targets_is_told(tmp_path, stated, told):
    """Engines cut requests to it."""
    place = foreign(tmp_path / "draft", "eagle", "vllm", max_position_embeddings=stated)
    reasons = {each.check: each.reason for each in examined(place, **FEW).not_checked}
    name = f"contexts of more than {stated} tokens in serving engines"
    assert (name in reasons) == told
    if told:
        said = "its config.json says max_position_embeddings 32, to which engines cut requests; the target takes 256"
        assert reasons[name] == said


def test_the_draft_that_was_trained_is_named_as_such(tmp_path):
    with pytest.raises(UserError, match=r"^trained=.*: is a DFlash draft"):
        examined(PLACE / "eagle", trained=str(foreign(tmp_path / "a", "eagle", "vllm", model_type="dflash")))
