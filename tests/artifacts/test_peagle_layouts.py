"""P-EAGLE drafts as vLLM and speculators have them: written, replayed by the engine's rules, and read again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_train.artifacts import layouts
from eagle_train.artifacts.card import card
from eagle_train.artifacts.convert import ExportConfig, Source, convert
from eagle_train.artifacts.foreign import load_foreign
from eagle_train.artifacts.format import load_draft, read_artifact
from eagle_train.drafts import Draft, PeagleDraft
from eagle_train.errors import UserError
from eagle_train.models.draft_quantisation import Quant, quant_of
from eagle_train.models.target import Target
from tests.support.serving_engines import read, replay
from tests.support.tiny import SIZES, tiny_model, tiny_peagle

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LAYERS = 8
FEW = {"vocab_size": 40, "vocabulary": [1, *range(10, 88, 2)]}
KINDS = [{}, {"num_layers": 3, "norm_before_fc": True, "norm_before_residual": True, "mask_token": 7, **FEW}]
IDS = ["default", "few tokens"]
LAYOUTS = ["vllm", "speculators"]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(num_hidden_layers=LAYERS, **WIDE), name="tiny-wide")


def served() -> dict:
    return {**SIZES, **WIDE, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}


def a_draft(target: Target, **kind) -> PeagleDraft:
    return tiny_peagle(target, **{"layers": [2, 4, 5], "steps": 6} | kind)


def exported(target: Target, draft: PeagleDraft, out: Path, layout: str, **settings) -> Path:
    given = {"dtype": "float32", "quant": Quant(), "rounding": "nearest", "calibration_tokens": 1, "evaluations": []}
    given |= {"license": None, "push_to": None, "push_private": True, "device": "cpu"} | settings
    config = ExportConfig(checkpoint="run", out=str(out), layout=layout, **given)
    convert(Source.of(draft, target.identity, {}, out), config, target, None)
    return out


def of_others(out: Path, **changes) -> Path:
    """The same directory without what says that it is ours, and with changes of its config.json."""
    config = json.loads((out / "config.json").read_text())
    config.pop("eagle_train", None)
    (out / "config.json").write_text(json.dumps(config | changes))
    return out


def same_draft(one: Draft, other: Draft) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_is_whole_in_its_engine_and_ours(target, tmp_path, layout, kind):
    draft = a_draft(target, **kind)
    out = exported(target, draft, tmp_path / "out", layout)
    config, tensors = read(out)
    loaded = replay("vllm-peagle", config, tensors, served())
    assert loaded.whole, loaded
    assert loaded.filled == set(loaded.parameters)
    assert loaded.parameters["mask_hidden"] == (1, 3 * 128)
    assert config["pard_token" if layout == "vllm" else "mask_token_id"] == draft.config.mask_token
    assert "norm_output" not in config
    assert tensors["mask_hidden"][0] == ((1, 384) if layout == "vllm" else (1, 1, 384))
    assert same_draft(load_draft(out, target.identity), draft)
    assert read_artifact(out).draft == replace(draft.config, first_token="skip")


def test_speculators_name_the_kind_and_how_many_tokens_a_forward_proposes(target, tmp_path):
    config, _ = read(exported(target, a_draft(target), tmp_path / "out", "speculators"))
    assert config["architectures"] == ["PEagleSpeculator"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "peagle"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 6


@pytest.mark.parametrize("changes", ["no mask", "no token"])
def test_vllm_needs_the_mask_and_its_token(target, tmp_path, changes):
    config, tensors = read(exported(target, a_draft(target), tmp_path / "out", "vllm"))
    assert replay("vllm-peagle", config, tensors, served()).whole
    (tensors if changes == "no mask" else config).pop("mask_hidden" if changes == "no mask" else "pard_token")
    assert replay("vllm-peagle", config, tensors, served()).errors


@pytest.mark.parametrize(
    ("scheme", "scope"), [("fp8", "ffn"), ("int4", "ffn"), ("fp8", "all_linear"), ("int4", "all_linear")]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_drafts_are_whole(target, tmp_path, layout, scheme, scope):
    draft = a_draft(target, **KINDS[1])
    out = exported(target, draft, tmp_path / "out", layout, quant=Quant(scheme, scope), dtype="bfloat16")
    loaded = replay("vllm-peagle", *read(out), served())
    assert loaded.whole, loaded
    packed = "weight_packed" if scheme == "int4" else "weight_scale"
    assert f"model.layers.1.mlp.gate_up_proj.{packed}" in loaded.parameters
    assert (f"model.fc.{packed}" in loaded.parameters) == (scope == "all_linear")
    assert str(quant_of(load_draft(out, target.identity))) == f"{scheme} ({scope})"


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_of_others_are_read(target, tmp_path, layout, kind):
    """Speculators say how many tokens a forward proposes; else it is the default's number."""
    draft = a_draft(target, **kind)
    loaded = load_foreign(of_others(exported(target, draft, tmp_path / "out", layout)), target)
    assert same_draft(loaded, draft)
    steps = 6 if layout == "speculators" else 8
    assert loaded.config == replace(draft.config, first_token="skip", steps=steps)


def test_a_flag_that_speculators_leave_out_is_false(target, tmp_path):
    """Unlike in EAGLE-3's, where `norm_before_residual` is true unless it is said."""
    out = of_others(exported(target, a_draft(target), tmp_path / "out", "speculators"))
    config = json.loads((out / "config.json").read_text())
    del config["norm_before_residual"]
    (out / "config.json").write_text(json.dumps(config))
    assert load_foreign(out, target).config.norm_before_residual is False


def test_the_mask_token_is_found_where_vllm_looks(target, tmp_path):
    """First in `dflash_config`, then `mask_token_id`."""
    out = exported(target, a_draft(target), tmp_path / "out", "vllm")
    for places, wanted in ({"mask_token_id": 8}, 8), ({"mask_token_id": 8, "dflash_config": {"mask_token_id": 9}}, 9):
        assert load_foreign(of_others(out, **places), target).config.mask_token == wanted


@pytest.mark.parametrize("config", [{"architectures": ["PEagleDraftModel"]}, {"speculators_model_type": "peagle"}])
def test_what_is_named_peagle_has_a_mask(target, tmp_path, config):
    out = of_others(exported(target, a_draft(target), tmp_path / "out", "vllm"), **config)
    tensors = load_file(out / "model.safetensors")
    del tensors["mask_hidden"]
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(UserError, match=r"(?i)names .*peagle.*, and the file has no mask_hidden"):
        load_foreign(out, target)
    with pytest.raises(UserError, match=r"names pard_token, and the file has no mask_hidden"):
        load_foreign(of_others(out, architectures=["LlamaForCausalLMEagle3"], speculators_model_type=None), target)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_embedding_of_its_own_is_told(target, tmp_path, layout):
    """Speculators train it by default."""
    out = of_others(exported(target, a_draft(target), tmp_path / "out", layout))
    tensors = load_file(out / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": target.embedding.detach() + 1}, out / "model.safetensors")
    told = {
        "vllm": "is not the embedding of tiny-wide: it is for another target, or has an embedding of its own, which",
        "speculators": r"out: has an embedding of its own \(trained\), which our drafts do not have$",
    }
    with pytest.raises(UserError, match=told[layout]):
        load_foreign(out, target)
    if layout == "speculators":
        with pytest.raises(UserError, match="it is for another target, or has"):
            load_foreign(of_others(out, embed_requires_grad=False), target)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"pard_token": None}, r"names no mask token, and the file has mask_hidden \(P-EAGLE\); add pard_token"),
        ({}, {"pard_token": "x"}, "the mask token is 'x', and must be a token id"),
        ({}, {"pard_token": 96}, r"draft\.mask_token=96: must be a token id of the target, below 96"),
        ({"mask_hidden": torch.zeros(1, 128)}, {}, "mask_hidden"),
        ({}, {"speculators_config": [1]}, r"speculators_config is \[1\], and must be a mapping$"),
        (
            {},
            {"speculators_config": {"proposal_methods": [3]}},
            r"proposal_methods is \[3\], and must be a list of mappings$",
        ),
    ],
)
def test_drafts_of_others_that_are_none(target, tmp_path, tensors, config, message):
    out = of_others(exported(target, a_draft(target), tmp_path / "out", "vllm"), **config)
    save_file(load_file(out / "model.safetensors") | tensors, out / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_foreign(out, target)


@pytest.mark.parametrize(
    ("kind", "layout", "reason"),
    [
        ({}, "sglang", r"^layout=sglang: SGLang has no P-EAGLE; use layout=native$"),
        (
            {},
            "trtllm",
            r"^layout=trtllm: is of TensorRT-LLM's TensorRT backend, and for no draft of draft=peagle; ",
        ),
        ({"fc_norm": True}, "speculators", r"the format of speculators has for P-EAGLE no norm of each fused layer"),
    ],
)
def test_what_an_engine_cannot_run_is_refused(target, kind, layout, reason):
    with pytest.raises(UserError, match=reason):
        layouts.check_runs(layout, a_draft(target, **kind).config, Quant())


@pytest.mark.parametrize(
    ("layout", "command"),
    [
        (
            "vllm",
            '"method": "eagle3", "model": "/path/to/draft", "num_speculative_tokens": 6, "parallel_drafting": true}',
        ),
        ("speculators", "vllm serve /path/to/draft\n"),
        ("native", "eagle-generate target=/path/to/target draft=/path/to/draft"),
    ],
)
def test_the_card_says_how_it_is_served(target, tmp_path, layout, command):
    out = exported(target, a_draft(target, **FEW), tmp_path / "mine", layout)
    told = card(read_artifact(out), load_file(out / "model.safetensors"))
    assert command in told
    assert "A P-EAGLE draft of 2 layers that proposes, 6 in one forward, tokens for `tiny-wide`" in told
    assert "fc of mask_hidden" in told
