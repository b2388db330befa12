"""Medusa heads as TensorRT-LLM has them: written, read by its own rules, and read again as ours and as others'."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_train.artifacts.card import card
from eagle_train.artifacts.convert import ExportConfig, Source, convert
from eagle_train.artifacts.foreign import load_foreign
from eagle_train.artifacts.format import load_draft, read_artifact
from eagle_train.drafts import MedusaDraft
from eagle_train.errors import UserError
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.loading import TargetConfig
from eagle_train.models.target import Target
from tests.support.tiny import shared_target, tiny_medusa, tiny_target

KINDS = {"the target's": {"heads": 3, "num_layers": 2}, "own": {"heads": 2, "own_head": True}}
FILE = "medusa_lm_head.safetensors"


def exported(target: Target, draft: MedusaDraft, out: Path, given_target: bool = True, **settings) -> Path:
    given = {"dtype": "float32", "quant": Quant(), "rounding": "nearest", "calibration_tokens": 1, "evaluations": []}
    given |= {"license": None, "push_to": None, "push_private": True, "device": "cpu"} | settings
    told = TargetConfig("target") if given_target else None
    config = ExportConfig(checkpoint="run", out=str(out), layout="trtllm", target=told, **given)
    convert(Source.of(draft, target.identity, {}, out), config, target, None)
    return out


def read_as_trtllm(tensors: dict[str, torch.Tensor], heads: int, layers: int) -> tuple[list[list], list[torch.Tensor]]:
    """Blocks (weight, bias) and LM head of each head: TensorRT-LLM 1.1, models/medusa/weight.py, load_medusa_hf."""
    blocks = [
        [[tensors[f"{h}.{layer}.linear.{part}"] for part in ("weight", "bias")] for layer in range(layers)]
        for h in range(heads)
    ]
    return blocks, [tensors[f"{h}.{layers}.weight"] for h in range(heads)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_the_engine_reads_and_ours(tmp_path, kind):
    target = shared_target()
    draft = tiny_medusa(target, **KINDS[kind])
    out = exported(target, draft, tmp_path / "out")
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", FILE]
    tensors, config = load_file(out / FILE), json.loads((out / "config.json").read_text())
    heads, layers = draft.config.heads, draft.config.num_layers
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (heads, layers)
    blocks, lm_heads = read_as_trtllm(tensors, heads, layers)
    assert len(tensors) == heads * (2 * layers + 1)
    for level, (own, lm_head) in enumerate(zip(blocks, lm_heads, strict=True)):
        for (weight, bias), block in zip(own, draft.layers[level].mlp, strict=True):
            assert torch.equal(weight, block.weight)
            assert torch.equal(bias, block.bias)
        assert torch.equal(lm_head, (draft.own_head(level) or target.lm_head).weight)
    back = load_draft(out, target.identity)
    assert back.config == draft.config
    assert all(map(torch.equal, back.parameters(), draft.parameters()))
    told = card(read_artifact(out), tensors)
    assert f"--medusa_model_dir /path/to/draft \\\n    --num_medusa_heads {heads} --num_medusa_layers {layers} " in told


@pytest.mark.parametrize("form", ["safetensors", "pt", "prefixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_others_are_read(tmp_path, kind, form):
    """Of which config.json may count fewer than there are."""
    target = shared_target()
    draft = tiny_medusa(target, **KINDS[kind])
    out = exported(target, draft, tmp_path / "out")
    (out / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 1}))
    tensors = load_file(out / FILE)
    if form == "prefixed":
        save_file({f"medusa_head.{name}": tensor for name, tensor in tensors.items()}, out / FILE)
    if form == "pt":
        (out / FILE).unlink()
        torch.save(tensors, out / "medusa_lm_head.pt")
    found = load_foreign(out, target)
    assert found.config == draft.config
    assert all(map(torch.equal, found.parameters(), draft.parameters()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"0.0.linear.weight": None}, "tensor layers.0.mlp.0.weight is missing"),
        ({"1.1.weight": None}, "tensor lm_head.1.weight is missing"),
        ({"2.weight": torch.ones(2)}, "tensor 2.weight is not part of this draft"),
        ({"0.1.weight": torch.ones(95, 32)}, r"tensor lm_head.0.weight has shape \(95, 32\), must be \(96, 32\)"),
        (dict.fromkeys(["0.0.linear.weight", "0.0.linear.bias", "1.0.linear.weight", "1.0.linear.bias"]), "no Medusa"),
    ],
)
def test_heads_of_others_that_are_none(tmp_path, changes, message):
    target = shared_target()
    out = exported(target, tiny_medusa(target, **KINDS["own"]), tmp_path / "out")
    tensors = {name: tensor for name, tensor in (load_file(out / FILE) | changes).items() if tensor is not None}
    save_file(tensors, out / FILE)
    with pytest.raises(UserError, match=message):
        load_foreign(out, target)


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ({"vocab_size": 2, "vocabulary": [4, 5]}, {}, "TensorRT-LLM proposes from the target's whole vocabulary"),
        ({}, {"quant": Quant("fp8")}, "TensorRT-LLM reads no weights in compressed-tensors' formats"),
        ({}, {"given_target": False}, "its file repeats the target's LM head; give target=PATH"),
    ],
)
def test_what_the_engine_cannot_run_is_refused(tmp_path, kind, settings, reason):
    target = shared_target()
    with pytest.raises(UserError, match=f"^layout=trtllm: {reason}"):
        exported(target, tiny_medusa(target, **kind), tmp_path / "out", **settings)


def test_an_lm_head_with_a_bias_is_refused(tmp_path):
    target = tiny_target()
    target.lm_head = replace(target.lm_head, bias=torch.ones(96))
    with pytest.raises(UserError, match=r"^layout=trtllm: its LM heads have no bias, and tiny-llama's has one"):
        exported(target, tiny_medusa(target), tmp_path / "out")
