"""Loading rules of serving engines (tests/support/serving_engines.py): drafts that load whole, and silent faults."""

import json

import pytest
import torch
from safetensors.torch import save_file

from eagle_train.drafts import EagleConfig, EagleDraft
from tests.support.serving_engines import Loaded, Tensors, read, replay

H, INNER, VOCAB, HEADS, KV, HEAD_DIM, M, TARGET_LAYERS = 256, 384, 96, 4, 2, 64, 2, 12
TARGET = {
    "hidden_size": H,
    "vocab_size": VOCAB,
    "num_hidden_layers": TARGET_LAYERS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "trtllm": "LlamaForCausalLM"}
LAYER_1 = "layers.1.self_attn"

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
FFN_ONLY = ["re:.*self_attn.*", "re:.*fc$", "lm_head"]


def config(engine: str = "vllm", **others) -> dict:
    return {
        "architectures": [ARCHITECTURES[engine]],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_hidden_layers": M,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        **others,
    }


def full_config(**others) -> dict:
    return config() | {"architectures": ["EagleMistralForCausalLM"]} | others


def names(norms: str = "eagle1") -> Tensors:
    """The tensors of a draft of ours, by the names it has for them."""
    draft = EagleDraft(EagleConfig(H, INNER, HEADS, KV, HEAD_DIM, 128, num_layers=M, norms=norms))
    return {name: (tuple(tensor.shape), torch.bfloat16) for name, tensor in draft.state_dict().items()}


def tensors_for(engine: str) -> Tensors:
    extra = {} if engine == "vllm" else {"fc.bias": ((H,), torch.bfloat16)}
    extra |= {"embed_tokens.weight": ((VOCAB, H), torch.bfloat16)} if engine == "trtllm" else {}
    return names() | extra


def prefixed(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def without(tensors: Tensors, *left_out: str) -> Tensors:
    assert set(left_out) <= set(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in left_out}


def quantisation(scheme: str, ignore: list[str], targets: list[str] | None = None) -> dict:
    form, weights, inputs = {"int4": ("pack-quantized", INT4, None), "fp8": ("float-quantized", FP8, TOKENS)}[scheme]
    group = {"targets": targets or ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }
    }


def quantised(tensors: Tensors, scheme: str, *places: str) -> Tensors:
    """With the linear modules at `places` as compressed-tensors writes them."""
    found: Tensors = {}
    for name, (shape, dtype) in tensors.items():
        stem = name.removesuffix(".weight")
        if len(shape) != 2 or not any(place in name for place in places):
            found[name] = (shape, dtype)
        elif scheme == "fp8":
            found |= {name: (shape, torch.float8_e4m3fn), f"{stem}.weight_scale": ((shape[0], 1), torch.float32)}
        else:
            found[f"{stem}.weight_packed"] = ((shape[0], shape[1] // 8), torch.int32)
            found[f"{stem}.weight_scale"] = ((shape[0], shape[1] // 128), torch.bfloat16)
            found[f"{stem}.weight_shape"] = ((2,), torch.int64)
    return found


def nothing_told(loaded: Loaded) -> bool:
    return not loaded.errors and not loaded.whole


# --- drafts that load whole


@pytest.mark.parametrize("engine", ARCHITECTURES)
def test_an_eagle1_draft_is_whole(engine):
    loaded = replay(engine, config(engine), tensors_for(engine), TARGET)
    assert loaded.whole
    assert not loaded.skipped
    assert loaded.filled == set(loaded.parameters)
    assert loaded.parameters["model.fc.weight"] == (H, 2 * H)
    assert loaded.parameters[f"model.{LAYER_1}.qkv_proj.weight"] == ((HEADS + 2 * KV) * HEAD_DIM, H)
    assert "model.layers.0.input_layernorm.weight" not in loaded.parameters
    if engine != "trtllm":
        assert loaded.parameters["model.layers.0.mlp.gate_up_proj.weight"] == (2 * INNER, H)


def test_a_draft_with_all_norms_is_whole_in_vllm():
    loaded = replay("vllm", full_config(), prefixed(names("full")), TARGET)
    assert loaded.whole
    assert not loaded.skipped
    assert {"model.norm.weight", "model.layers.0.input_layernorm.weight"} <= loaded.filled


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_one_quantisation_of_the_feed_forward_suits_both(engine, scheme):
    tensors = quantised(tensors_for(engine), scheme, ".mlp.")
    loaded = replay(engine, config(engine, **quantisation(scheme, FFN_ONLY)), tensors, TARGET)
    assert loaded.whole
    assert not loaded.skipped
    shape = loaded.parameters["model.layers.0.mlp.gate_up_proj.weight_scale"]
    assert shape == (2 * INNER, 2 if scheme == "int4" else 1)
    if scheme == "int4":
        assert loaded.parameters["model.layers.0.mlp.down_proj.weight_packed"] == (H, INNER // 8)
        assert loaded.parameters["model.layers.0.mlp.gate_up_proj.weight_shape"] == (2,)


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_all_linears_quantised(scheme):
    options = quantisation(scheme, ["lm_head"])
    assert replay("vllm", config(**options), quantised(names(), scheme, ""), TARGET).whole
    assert replay("vllm", full_config(**options), prefixed(quantised(names("full"), scheme, "")), TARGET).whole
    assert replay(
        "sglang", config("sglang", **options), quantised(tensors_for("sglang"), scheme, "layers"), TARGET
    ).whole


def test_a_directory(tmp_path):
    save_file(
        {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in names().items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(config()))
    assert read(tmp_path) == (config(), names())


# --- what no engine tells


@pytest.mark.parametrize("engine", ARCHITECTURES)
@pytest.mark.parametrize("name", [f"{LAYER_1}.k_proj.weight", "layers.0.post_attention_layernorm.weight", "fc.weight"])
def test_a_missing_tensor(engine, name):
    loaded = replay(engine, config(engine), without(tensors_for(engine), name), TARGET)
    (parameter,) = loaded.uninitialised
    assert parameter == "model." + name.replace("k_proj", "qkv_proj")
    assert parameter not in loaded.filled
    assert nothing_told(loaded) == (engine != "trtllm")


def test_a_missing_bias_of_fc():
    loaded = replay("sglang", config("sglang"), names(), TARGET)
    assert nothing_told(loaded)
    assert loaded.uninitialised == {"model.fc.bias"}
    assert replay("vllm", config(), tensors_for("sglang"), TARGET).skipped == {"fc.bias"}


def test_names_that_have_the_prefix_already():
    loaded = replay("sglang", config("sglang"), prefixed(tensors_for("sglang")), TARGET)
    assert nothing_told(loaded)
    assert not loaded.filled
    assert len(loaded.skipped) == len(tensors_for("sglang"))
    assert len(replay("vllm", config(), prefixed(names()), TARGET).errors) == len(names())


def test_norms_that_sglang_has_not():
    loaded = replay("sglang", config("sglang"), names("full") | tensors_for("sglang"), TARGET)
    assert loaded.skipped == {"norm.weight", "layers.0.input_layernorm.weight"}
    assert not loaded.errors


@pytest.mark.parametrize("name", ["norm.weight", "layers.0.input_layernorm.weight", "lm_head.weight", "d2t"])
def test_what_vllm_has_no_place_for(name):
    tensors = names("full") | {"lm_head.weight": ((VOCAB, H), torch.bfloat16), "d2t": ((VOCAB,), torch.int64)}
    (error,) = replay("vllm", config(), names() | {name: tensors[name]}, TARGET).errors
    assert error.startswith(f"{name}: ")


def test_an_lm_head_is_skipped_by_sglang():
    tensors = tensors_for("sglang") | {"lm_head.weight": ((VOCAB, H), torch.bfloat16)}
    loaded = replay("sglang", config("sglang"), tensors, TARGET)
    assert loaded.whole
    assert loaded.skipped == {"lm_head.weight"}


def test_vllm_looks_for_missing_norms_only_where_nothing_is_quantised():
    tensors = without(prefixed(names("full")), "model.norm.weight")
    assert replay("vllm", full_config(), tensors, TARGET).errors == ["model.norm.weight: not initialised"]
    quantisations = quantisation("fp8", FFN_ONLY)
    assert nothing_told(replay("vllm", full_config(**quantisations), quantised(tensors, "fp8", ".mlp."), TARGET))
    missing = without(prefixed(names("full")), "model.fc.weight")
    assert nothing_told(replay("vllm", full_config(), missing, TARGET))


def test_names_without_the_prefix_leave_fc_alone_in_mistral():
    (error,) = replay("vllm", full_config(), names("full"), TARGET).errors
    assert error.startswith("fc.weight: ")


# Names of the draft's own layers; of its file's modules; of the engine's.
OWN = [f"model.layers.{layer}.self_attn.{name}" for layer in range(M) for name in ("qkv_proj", "o_proj")]
UNFUSED = [f"model.layers.{TARGET_LAYERS + i}.self_attn.{name}_proj" for i in range(M) for name in "qkvo"]
FUSED = [f"model.layers.{TARGET_LAYERS + i}.self_attn.{name}" for i in range(M) for name in ("qkv_proj", "o_proj")]


@pytest.mark.parametrize(
    ("engine", "ignore"), [("vllm", OWN), ("vllm", UNFUSED), ("sglang", FUSED), ("sglang", UNFUSED)]
)
def test_names_in_ignore_that_name_nothing(engine, ignore):
    tensors = quantised(tensors_for(engine), "fp8", ".mlp.")
    loaded = replay(engine, config(engine, **quantisation("fp8", ["re:.*fc$", *ignore])), tensors, TARGET)
    assert nothing_told(loaded)
    assert f"model.{LAYER_1}.qkv_proj.weight_scale" in loaded.uninitialised, "as low as numbers go"
    assert f"{LAYER_1}.q_proj.weight" in loaded.spoiled, "bf16 that is read as FP8"


@pytest.mark.parametrize(("engine", "ignore"), [("vllm", FUSED), ("sglang", OWN), ("sglang", ["qkv_proj", "o_proj"])])
def test_names_in_ignore_that_are_right(engine, ignore):
    tensors = quantised(tensors_for(engine), "int4", ".mlp.")
    assert replay(engine, config(engine, **quantisation("int4", ["re:.*fc$", *ignore])), tensors, TARGET).whole


def test_int4_under_wrong_names():
    options = quantisation("int4", ["re:.*fc$", *OWN])
    loaded = replay("vllm", config(**options), quantised(names(), "int4", ".mlp."), TARGET)
    assert any(error.startswith(f"{LAYER_1}.q_proj.weight: ") for error in loaded.errors)
    options = quantisation("int4", ["re:.*fc$", *FUSED])
    assert nothing_told(
        replay("sglang", config("sglang", **options), quantised(tensors_for("sglang"), "int4", ".mlp."), TARGET)
    )


def test_regular_expressions_see_fused_names():
    tensors = quantised(names(), "int4", ".mlp.")
    for targets, is_right in ([r"re:.*(gate|up|down)_proj$"], True), ([r"re:.*(gate_proj|down_proj)$"], False):
        options = quantisation("int4", ["lm_head"], targets)
        assert replay("vllm", config(**options), tensors, TARGET).whole == is_right


def test_sglang_wants_a_word_on_every_linear():
    options = quantisation("int4", ["lm_head"], ["re:.*mlp.*"])
    tensors = quantised(tensors_for("sglang"), "int4", ".mlp.")
    errors = replay("sglang", config("sglang", **options), tensors, TARGET).errors
    assert len(errors) == 2 * M
    assert "model.layers.0.self_attn.qkv_proj" in errors[0]


def test_fc_is_never_quantised_in_sglang():
    options = quantisation("int4", ["lm_head"])
    loaded = replay("sglang", config("sglang", **options), quantised(tensors_for("sglang"), "int4", ""), TARGET)
    assert nothing_told(loaded)
    assert loaded.uninitialised == {"model.fc.weight"}


@pytest.mark.parametrize("engine", ARCHITECTURES)
def test_fp8_weights_without_a_configuration(engine):
    loaded = replay(engine, config(engine), quantised(tensors_for(engine), "fp8", ".mlp."), TARGET)
    assert "layers.0.mlp.up_proj.weight" in loaded.spoiled
    assert nothing_told(loaded) == (engine != "vllm")


@pytest.mark.parametrize(
    ("name", "shape", "fate"),
    [
        (f"{LAYER_1}.q_proj.weight", (2 * H, H), {"vllm": "cut", "sglang": "cut", "trtllm": "error"}),
        (f"{LAYER_1}.q_proj.weight", (H // 2, H), {"vllm": "error", "sglang": "error", "trtllm": "padded"}),
        (f"{LAYER_1}.q_proj.weight", (H, 2 * H), {"vllm": "error", "sglang": "error", "trtllm": "error"}),
        ("layers.0.mlp.down_proj.weight", (H, 2 * INNER), {"vllm": "cut", "sglang": "cut", "trtllm": "error"}),
        ("fc.weight", (H, 3 * H), {"vllm": "error", "sglang": "error", "trtllm": "error"}),
        ("fc.weight", (H, H), {"vllm": "error", "sglang": "error", "trtllm": "padded"}),
    ],
)
@pytest.mark.parametrize("engine", ARCHITECTURES)
def test_a_tensor_that_does_not_fit(engine, name, shape, fate):
    loaded = replay(engine, config(engine), tensors_for(engine) | {name: (shape, torch.bfloat16)}, TARGET)
    assert (loaded.spoiled == {name}) == (fate[engine] != "error") == (not loaded.errors)


# --- fields of config.json


@pytest.mark.parametrize(
    ("engine", "others", "told"),
    [
        ("vllm", {"architectures": ["LlamaForCausalLMEagle"]}, "EagleLlamaForCausalLMEagle is none of"),
        ("vllm", {"architectures": None}, "architectures="),
        ("vllm", {"layer_types": ["full_attention"] * M}, "layer_types"),
        ("vllm", {"vocab_size": 32}, "vocab_size=32"),
        ("vllm", {"model_type": "mistral"}, "model_type=mistral"),
        ("vllm", {"quantization_config": {"quant_method": "fp8", "config_groups": {}}}, "quant_method=fp8"),
        ("sglang", {"architectures": ["LlamaForCausalLM"]}, "must be LlamaForCausalLMEagle"),
        ("sglang", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("sglang", {"max_position_embeddings": 64}, "max_position_embeddings=64"),
    ],
)
def test_fields_that_stop_an_engine(engine, others, told):
    (error,) = replay(engine, config(engine) | others, tensors_for(engine), TARGET).errors
    assert told in error


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_bias_in_the_config_is_the_attentions(engine):
    loaded = replay(engine, config(engine, bias=True), tensors_for(engine), TARGET)
    assert nothing_told(loaded)
    assert loaded.parameters[f"model.{LAYER_1}.qkv_proj.bias"] == ((HEADS + 2 * KV) * HEAD_DIM,)
    assert len(loaded.uninitialised) == 2 * M


def test_an_embedding_in_the_file():
    embedding = {"embed_tokens.weight": ((VOCAB, H), torch.bfloat16)}
    assert "model.embed_tokens.weight" in replay("vllm", config(), names() | embedding, TARGET).filled, (
        "kept if it differs"
    )
    assert replay("sglang", config("sglang"), tensors_for("sglang") | embedding, TARGET).skipped == set(embedding)
    missing = without(tensors_for("trtllm"), *embedding)
    assert replay("trtllm", config("trtllm"), missing, TARGET).errors == ["model.embed_tokens.weight: missing"]


def test_a_tied_target_has_no_lm_head_for_tensorrt():
    tied = TARGET | {"tie_word_embeddings": True}
    assert len(replay("trtllm", config("trtllm"), tensors_for("trtllm"), tied).errors) == 1
