"""EAGLE-3 drafts as vLLM, SGLang and speculators have them: written, replayed by the engines' rules, and read again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_train.artifacts import layouts
from eagle_train.artifacts.card import card
from eagle_train.artifacts.convert import ExportConfig, Source, convert
from eagle_train.artifacts.foreign import load_foreign
from eagle_train.artifacts.format import load_draft, read_artifact
from eagle_train.drafts import Eagle3Draft
from eagle_train.errors import UserError
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.layers import Rotary
from eagle_train.models.target import Target
from tests.support.serving_engines import read, replay
from tests.support.tiny import SIZES, tiny_draft, tiny_eagle3, tiny_model

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LAYERS = 8
FEW = {"vocab_size": 40, "vocabulary": [1, *range(10, 88, 2)]}
KINDS = [{}, {"num_layers": 2, "norm_output": True, "fc_norm": True, **FEW}]
ONE_NORM = {"norm_before_fc": True}
VLLM_ALONE = {"norm_before_residual": True, "norm_before_fc": True, "layers": [3]}
ENGINE = {"vllm": "vllm-eagle3", "sglang": "sglang-eagle3", "speculators": "vllm-eagle3"}


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model(num_hidden_layers=LAYERS, **WIDE), name="tiny-wide")


def served(target: Target) -> dict:
    return {**SIZES, **WIDE, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}


def a_draft(target: Target, **kind) -> Eagle3Draft:
    return tiny_eagle3(target, **{"layers": [2, 4, 5]} | kind)


def exported(target: Target, draft: Eagle3Draft, out: Path, layout: str, **settings) -> Path:
    given = {"dtype": "float32", "quant": Quant(), "rounding": "nearest", "calibration_tokens": 1, "evaluations": []}
    given |= {"license": None, "push_to": None, "push_private": True, "device": "cpu"} | settings
    config = ExportConfig(checkpoint="run", out=str(out), layout=layout, **given)
    convert(Source.of(draft, target.identity, {}, out), config, target, None)
    return out


def same_draft(one: Eagle3Draft, other: Eagle3Draft) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", [*KINDS, ONE_NORM], ids=["default", "few tokens", "one norm"])
@pytest.mark.parametrize("layout", ENGINE)
def test_an_export_is_whole_in_its_engine_and_ours(target, tmp_path, layout, kind):
    draft = a_draft(target, **kind)
    out = exported(target, draft, tmp_path / "out", layout)
    config, tensors = read(out)
    loaded = replay(ENGINE[layout], config, tensors, served(target))
    assert loaded.whole, loaded
    assert loaded.filled == set(loaded.parameters)
    assert loaded.skipped == ({"t2d"} if layout == "speculators" and "vocabulary" in kind else set())
    assert loaded.parameters["model.fc.weight"] == (128, 3 * 128)
    assert loaded.parameters["model.layers.0.self_attn.qkv_proj.weight"] == (8 * 32, 2 * 128)
    assert same_draft(load_draft(out, target.identity), draft)
    assert read_artifact(out).draft == replace(draft.config, first_token="skip")


@pytest.mark.parametrize("layout", ENGINE)
def test_a_vocabulary_of_all_tokens_is_the_targets_own(target, tmp_path, layout):
    """vLLM has no place for a map then."""
    whole = target.identity.vocab_size
    draft = a_draft(target, vocab_size=whole)
    assert (draft.config.vocab_size, draft.config.vocabulary) == (None, None)
    out = exported(target, draft, tmp_path / "out", layout)
    assert replay(ENGINE[layout], *read(out), served(target)).whole


def test_drafts_of_others_are_read_as_vllm_reads_them(target, tmp_path):
    """Where `norm_before_fc` stands, and that empty lists name no layers."""
    out = exported(target, a_draft(target, norm_before_fc=True), tmp_path / "out", "vllm")
    values = json.loads((out / "config.json").read_text())
    del values["eagle_train"], values["norm_before_fc"]
    values["eagle_config"]["norm_before_fc"] = True
    values["eagle_aux_hidden_state_layer_ids"] = []
    (out / "config.json").write_text(json.dumps(values))
    found = load_foreign(out, target).config
    assert (found.norm_before_fc, found.layers) == (True, [2, 4, 5])
    values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = []
    (out / "config.json").write_text(json.dumps(values))
    assert load_foreign(out, target).config.layers == a_draft(target, layers=None).config.layers


def test_one_directory_is_for_both_engines(target, tmp_path):
    """The same files but for what says which of them it was written for."""
    draft = a_draft(target, **KINDS[1])
    one, other = (exported(target, draft, tmp_path / layout, layout) for layout in ("vllm", "sglang"))
    configs = [json.loads((out / "config.json").read_text()) for out in (one, other)]
    for config in configs:
        config.pop("eagle_train")
    assert configs[0] == configs[1]
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert configs[0]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert configs[0]["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    for engine in ("vllm-eagle3", "sglang-eagle3"):
        assert replay(engine, *read(one), served(target)).whole


@pytest.mark.parametrize("kind", [{"window": 24}, {"window": 24, "num_layers": 2}], ids=str)
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_a_window_is_vllms_and_ours(target, tmp_path, layout, kind):
    draft = a_draft(target, **kind)
    out = exported(target, draft, tmp_path / "out", layout)
    loaded = replay("vllm-eagle3", *read(out), served(target))
    assert loaded.whole
    assert loaded.windows == [24] * draft.config.num_layers
    assert load_draft(out, target.identity).config == draft.config
    config = json.loads((out / "config.json").read_text())
    del config["eagle_train"]
    (out / "config.json").write_text(json.dumps(config))
    assert load_foreign(out, target).config == draft.config
    LlamaConfig.from_dict(config.get("transformer_layer_config", config))  # vLLM reads it so


def test_a_window_is_an_option_of_sglangs(target, tmp_path):
    """Which counts the positions before a token's own."""
    out = exported(target, a_draft(target, window=24), tmp_path / "mine", "sglang")
    told = card(read_artifact(out), load_file(out / "model.safetensors"))
    assert "--speculative-num-draft-tokens 4 \\\n    --speculative-draft-window-size 23\n```" in told
    assert replay("sglang-eagle3", *read(out), served(target)).whole
    without = exported(target, a_draft(target), tmp_path / "other", "sglang")
    assert "window" not in card(read_artifact(without), load_file(without / "model.safetensors"))


def test_the_longest_context_is_the_targets_at_least(target, tmp_path):
    """Engines cut requests to the draft's; a shorter one is raised where no rotary angle depends on it."""
    out = exported(target, a_draft(target), tmp_path / "out", "vllm")
    values = json.loads((out / "config.json").read_text())
    del values["eagle_train"]
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    for stated, wanted in ((7, 128), (128, 128), (256, 256)):
        (out / "config.json").write_text(json.dumps(values | {"max_position_embeddings": stated}))
        assert load_foreign(out, target).config.max_position_embeddings == wanted
    own = {"max_position_embeddings": 7, "rope_parameters": dynamic, "rope_scaling": dynamic}
    (out / "config.json").write_text(json.dumps(values | own))
    assert load_foreign(out, target).config.max_position_embeddings == 7
    with pytest.raises(UserError, match=r"^draft\.max_position_embeddings=7: must be at least the target's, 128"):
        a_draft(target, max_position_embeddings=7)


def test_the_offsets_name_the_targets_tokens(target, tmp_path):
    out = exported(target, a_draft(target, **FEW), tmp_path / "out", "vllm")
    offsets = load_file(out / "model.safetensors")["d2t"]
    assert offsets.dtype == torch.int64
    assert (torch.arange(40) + offsets).tolist() == FEW["vocabulary"]
    known = load_file(exported(target, a_draft(target, **FEW), tmp_path / "s", "speculators") / "model.safetensors")
    assert known["t2d"].nonzero().flatten().tolist() == FEW["vocabulary"]


@pytest.mark.parametrize(
    ("scheme", "scope"), [("fp8", "ffn"), ("int4", "ffn"), ("fp8", "all_linear"), ("int4", "all_linear")]
)
@pytest.mark.parametrize("layout", ENGINE)
def test_quantised_drafts_are_whole(target, tmp_path, layout, scheme, scope):
    draft = a_draft(target, **KINDS[1])
    if (layout, scope) == ("sglang", "all_linear"):
        with pytest.raises(UserError, match=r"^layout=sglang: SGLang runs fc as it is, and quant\.scope=all_linear"):
            exported(target, draft, tmp_path / "out", layout, quant=Quant(scheme, scope))
        return
    out = exported(target, draft, tmp_path / "out", layout, quant=Quant(scheme, scope), dtype="bfloat16")
    loaded = replay(ENGINE[layout], *read(out), served(target))
    assert loaded.whole, loaded
    packed = "weight_packed" if scheme == "int4" else "weight_scale"
    assert f"model.layers.1.mlp.gate_up_proj.{packed}" in loaded.parameters
    assert (f"model.layers.0.self_attn.qkv_proj.{packed}" in loaded.parameters) == (scope == "all_linear")
    assert "lm_head.weight" in loaded.parameters


def test_what_names_as_eagles_would_do_to_a_quantised_draft(target, tmp_path):
    """Layer 0's q, k and v have no `self_attn` in their names: left out by that word, they would be read as FP8."""
    out = exported(target, a_draft(target), tmp_path / "out", "vllm", quant=Quant("fp8"), dtype="bfloat16")
    config, tensors = read(out)
    config["quantization_config"]["ignore"] = ["re:.*self_attn.*", "re:.*fc$", "lm_head"]
    loaded = replay("vllm-eagle3", config, tensors, served(target))
    assert "midlayer.self_attn.q_proj.weight" in loaded.spoiled


@pytest.mark.parametrize("kind", [*KINDS, VLLM_ALONE], ids=["default", "few tokens", "norms"])
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_drafts_of_others_are_read(target, tmp_path, layout, kind):
    draft = a_draft(target, **kind)
    out = exported(target, draft, tmp_path / "out", layout)
    config = json.loads((out / "config.json").read_text())
    del config["eagle_train"]
    (out / "config.json").write_text(json.dumps(config))
    loaded = load_foreign(out, target)
    assert same_draft(loaded, draft)
    assert loaded.config == replace(draft.config, first_token="skip")
    assert replay("vllm-eagle3", *read(out), served(target)).whole


def test_ids_of_sglang_alone_are_one_lower_and_rows_may_be_in_any_order(target, tmp_path):
    draft = a_draft(target, **FEW)
    out = exported(target, draft, tmp_path / "out", "sglang")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    del config["eagle_train"], config["eagle_aux_hidden_state_layer_ids"]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    tensors["d2t"] = torch.tensor(FEW["vocabulary"])[order] - torch.arange(40)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    loaded = load_foreign(out, target)
    assert loaded.config.layers == [2, 4, 5]
    assert same_draft(loaded, draft)


def test_a_draft_without_fused_layers_is_told(target, tmp_path):
    def change(config: dict, tensors: dict) -> None:
        config["eagle_config"] = {"use_aux_hidden_state": False}
        del tensors["fc.weight"]

    with pytest.raises(UserError, match=r"no fc\.weight, so it fuses no layers \(eagle_config"):
        load_foreign(of_others(target, tmp_path / "out", change), target)


MODELOPT = {  # as ModelOpt writes it
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
    "eagle_aux_hidden_state_layer_ids": [],
}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"eagle_config": MODELOPT}, False),
        ({"eagle_config": MODELOPT | {"return_hidden_post_norm": False, "of_a_later_release": False}}, False),
        ({"eagle_config": MODELOPT | {"return_hidden_post_norm": True}}, True),
        ({"eagle_config": {"next_layer_regular": False}, "norm_output": True}, True),  # one layer has no next
    ],
)
def test_settings_of_modelopt_are_read(target, tmp_path, config, wanted):
    out = of_others(target, tmp_path / "out", lambda values, tensors: values.update(config))
    assert load_foreign(out, target).config.norm_output is wanted


def of_family(family: str, **changes: Any) -> Callable[[dict, dict], None]:
    """A config.json of this `model_type` that names no rotary settings."""

    def change(config: dict, tensors: dict) -> None:
        for name in ("rope_theta", "rope_scaling", "rope_parameters"):
            config.pop(name, None)
        config |= {"model_type": family} | changes

    return change


def test_what_a_config_leaves_out_is_as_its_family_says(target, tmp_path):
    rope = load_foreign(of_others(target, tmp_path / "oss", of_family("gpt_oss")), target).config.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"], rope["factor"]) == ("yarn", 150000.0, 32.0)
    rope = load_foreign(of_others(target, tmp_path / "none", of_family("no_family")), target).config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 10000.0}
    inner = of_family("llama4_text", intermediate_size=64, intermediate_size_mlp=256)
    found = load_foreign(of_others(target, tmp_path / "llama4", inner), target).config
    assert (found.intermediate_size, found.rope_parameters["rope_theta"]) == (256, 500000.0)
    named = of_family("gpt_oss", rope_parameters={"rope_type": "default", "rope_theta": 7e3})
    rope = load_foreign(of_others(target, tmp_path / "named", named), target).config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 7e3}
    with pytest.raises(UserError, match="names no rope_theta, and model_type gemma3_text has one for each type of"):
        load_foreign(of_others(target, tmp_path / "gemma", of_family("gemma3_text")), target)


def test_a_length_beside_the_rotary_settings_is_read(target, tmp_path):
    """As in Phi's configs, and as transformers reads it for engines."""

    def change(config: dict, tensors: dict) -> None:
        for name in ("rope_scaling", "rope_parameters"):
            config.pop(name)
        config["rope_scaling"] = {"type": "longrope", "short_factor": [1.5] * 16, "long_factor": [3.0] * 16}
        config |= {"original_max_position_embeddings": 32, "max_position_embeddings": 128}

    place = of_others(target, tmp_path / "phi", change)
    found = load_foreign(place, target).config
    assert found.rope_parameters["original_max_position_embeddings"] == 32
    wanted = LlamaConfig.from_dict(json.loads((place / "config.json").read_text()))
    wanted.standardize_rope_params()  # as vLLM does
    assert Rotary(found).scale == ROPE_INIT_FUNCTIONS["longrope"](wanted)[1] > 1


def test_tokens_that_t2d_alone_names(target, tmp_path):
    """The rows of the LM head are in the order of the target's ids."""
    draft = a_draft(target, **FEW)

    def change(config: dict, tensors: dict) -> None:
        del tensors["d2t"]
        tensors["t2d"] = torch.zeros(96, dtype=torch.bool).index_fill_(0, torch.tensor(FEW["vocabulary"]), True)

    place = of_others(target, tmp_path / "out", change, **FEW)
    assert same_draft(load_foreign(place, target), draft)
    again = exported(target, load_foreign(place, target), tmp_path / "again", "vllm")
    assert replay("vllm-eagle3", *read(again), served(target)).whole


def of_others(target, place: Path, change: Callable[[dict, dict], Any], **kind: Any) -> Path:
    """An export for vLLM as others write theirs; `change`: of its config.json and its tensors."""
    out = exported(target, a_draft(target, **kind), place, "vllm")
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    del config["eagle_train"]
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    return out


def add_zero_biases(config: dict, tensors: dict) -> None:
    tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(128)
    tensors["fc.bias"] = torch.zeros(128)


def name_sections(config: dict, tensors: dict) -> None:
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}


def number_layers(config: dict, tensors: dict) -> None:
    """As TensorRT-LLM does."""
    for name in list(tensors):
        place = name.replace("midlayer.", "midlayer.0.").replace("layers.1.", "midlayer.1.")
        tensors[place] = tensors.pop(name)


@pytest.mark.parametrize("change", [add_zero_biases, name_sections, number_layers])
def test_what_computes_the_same_is_read_the_same(target, tmp_path, change):
    draft = a_draft(target, num_layers=2)
    assert same_draft(load_foreign(of_others(target, tmp_path / "out", change, num_layers=2), target), draft)


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"d2t": torch.zeros(40, dtype=torch.int64) - 1}, {}, "d2t names tokens twice, or beyond the 96"),
        ({"d2t": torch.zeros(40)}, {}, "d2t has shape .*must be a row of whole numbers"),
        (
            {"d2t": torch.ones(40) > 0},
            {},
            r"d2t has shape \(40,\) and torch\.bool, and must be a row of whole numbers$",
        ),
        ({"d2t": None}, {}, r"draft_vocab_size is 40, and must be 96, as target tiny-wide and without d2t$"),
        ({"d2t": None}, {"draft_vocab_size": None}, r"lm_head\.weight has 40 rows, and must have 96, as target tiny-w"),
        ({"d2t": None, "t2d": torch.arange(96) < 39}, {}, r"draft_vocab_size is 40, and must be 39, as t2d$"),
        (
            {"d2t": None, "t2d": torch.zeros(40)},
            {},
            r"t2d has shape \(40,\) and torch\.float32, and must be 96 of torch",
        ),
        ({}, {"draft_vocab_size": 96}, r"draft_vocab_size is 96, and must be 40, as d2t$"),
        ({"lm_head.weight": torch.zeros(39, 128)}, {}, r"lm_head\.weight has 39 rows, and must have 40, as d2t$"),
        ({"lm_head.weight": torch.zeros(96, 128)}, {}, r"lm_head\.weight has 96 rows, and must have 40, as d2t$"),
        ({"lm_head.weight": torch.zeros(40)}, {}, r"lm_head\.weight has shape \(40,\), and must be a matrix$"),
        (
            {},
            {"rope_scaling": None, "rope_parameters": {"rope_theta": []}},
            r"rope_theta is \[\], and must be a number above 0$",
        ),
        ({}, {"architectures": 7, "layer_types": ["sliding_attention"]}, "sliding_window is None, and must be a whole"),
        ({}, {"speculators_model_type": ["eagle3"]}, r"is a draft of speculators' kind \['eagle3'\]"),
        ({"layers.1.hidden_norm.weight": torch.zeros(128)}, {}, "of the two, vLLM applies one and SGLang the other"),
        ({"midlayer.self_attn.q_proj.bias": torch.ones(128)}, {}, "q_proj.bias is not part of this draft"),
        (
            {},
            {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]},
            r"draft\.layers=\[2, 4, 9\]: must be numbers from 1 to 7, .*, the states that our drafts take$",
        ),
        ({}, {"norm_output": 1}, "norm_output is 1, and must be true or false"),
        ({}, {"layer_types": 7}, "layer_types is 7, and must be a list$"),
        ({}, {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types is .*must be the same for all"),
        (
            {},
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 0},
            "sliding_window is 0, and must be a whole",
        ),
        ({"embed_tokens.weight": torch.zeros(96, 128)}, {}, "is not the embedding of tiny-wide"),
        ({}, {"eagle_config": {"eh_proj_before_attn": True}}, r"eh_proj_before_attn is True, .* compute as with False"),
        ({}, {"eagle_config": {"parallel_draft_step": 4}}, r"parallel_draft_step is 4, .* compute as with 1"),
        ({}, {"eagle_config": {"next_layer_regular": False}}, r"next_layer_regular is False, .* compute as with True"),
        ({}, {"eagle_config": {"use_last_layernorm": False}}, r"use_last_layernorm is False, .* compute as with True"),
        ({}, {"eagle_config": {"swirl": 2}}, r"eagle_config\.swirl is 2, which we do not know; take it out where"),
    ],
)
def test_drafts_of_others_that_are_none(target, tmp_path, changes, config, message):
    out = exported(target, a_draft(target, **KINDS[1]), tmp_path / "out", "vllm")
    values, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    del values["eagle_train"]
    (out / "config.json").write_text(json.dumps(values | config))
    changed = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    save_file(changed, out / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_foreign(out, target)


@pytest.mark.parametrize(
    ("kind", "layout", "reason"),
    [
        (
            {"norm_before_fc": True, "fc_norm": True},
            "speculators",
            r"has norms of each fused layer \(draft\.fc_norm\) or one over all, and this draft has both",
        ),
        ({"norm_before_residual": True}, "sglang", r"SGLang begins layer 0's residual before its norm"),
        ({"layers": [3]}, "sglang", r"SGLang leaves fc out where one layer alone is fused"),
        ({"window": 1}, "sglang", r"SGLang knows no window of the token's own position alone \(draft\.window=1\)"),
        ({"sink": True}, "vllm", r"vLLM has no sinks in its Llama layers, and this draft has them \(draft\.sink\)"),
        ({"sink": True}, "speculators", r"speculators has no sinks in its Llama layers"),
        (
            {},
            "trtllm",
            r"^layout=trtllm: is of TensorRT-LLM's TensorRT backend, and for no draft of draft=eagle3; use one of",
        ),
    ],
)
def test_what_an_engine_cannot_run_is_refused(target, tmp_path, kind, layout, reason):
    draft = a_draft(target, **kind)
    with pytest.raises(UserError, match=reason):
        exported(target, draft, tmp_path / "out", layout)
    if layout == "sglang" and "window" not in kind:  # and computed differently, had it not been
        config = layouts.layout_config("vllm", draft.config, Quant(), "float32", target.identity)
        shapes = layouts.expected_shapes("vllm", draft.config, target.identity)
        tensors = {name: (shape, torch.float32) for name, shape in shapes.items()}
        assert replay("sglang-eagle3", config, tensors, served(target)).errors


def test_speculators_has_no_layout_for_eagle(target):
    with pytest.raises(
        UserError, match=r"^layout=speculators: is for no draft of draft=eagle; use one of native, vllm"
    ):
        layouts.check_runs("speculators", tiny_draft(target).config, Quant())


@pytest.mark.parametrize(
    ("layout", "command"),
    [
        ("vllm", '"method": "eagle3", "model": "/path/to/draft"'),
        ("sglang", "--speculative-algorithm EAGLE3"),
        ("speculators", "vllm serve /path/to/draft\n"),
        ("native", "eagle-generate target=/path/to/target draft=/path/to/draft"),
    ],
)
def test_the_card_says_how_it_is_served(target, tmp_path, layout, command):
    out = exported(target, a_draft(target, **FEW), tmp_path / "mine", layout)
    told = card(read_artifact(out), load_file(out / "model.safetensors"))
    assert command in told
    assert "token-map" not in told
