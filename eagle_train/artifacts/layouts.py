"""What each serving engine loads: tensor names, config.json, and which drafts it cannot run.

Taken from the engines' own loaders, which tests replay. Knows nothing of files or of rounding.
"""

from collections.abc import Mapping
from typing import Any

import torch

from eagle_train.errors import check
from eagle_train.models.draft_config import DraftConfig
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.target import Identity
from eagle_train.ops.weight_codes import GROUP

LAYOUTS = ("native", "vllm", "sglang", "trtllm")
NAMES = {"native": "our own engine", "vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_Tensors = Mapping[str, torch.Tensor]

_ARCHITECTURES = {
    ("vllm", "eagle1"): "LlamaForCausalLM",  # vLLM puts `Eagle` before it
    ("vllm", "full"): "EagleMistralForCausalLM",
    ("sglang", "eagle1"): "LlamaForCausalLMEagle",
    ("trtllm", "eagle1"): "LlamaForCausalLM",
}
_BIASED = ("sglang", "trtllm")  # their `fc` has a bias: without one in the file it is random, or an error
_QKV, _OUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
# Linear modules that stay unquantised, in the syntax of compressed-tensors. Expressions match from the start of an
# engine's module name, which has prefixes, fuses q, k and v, and in vLLM adds the number of target layers.
_IGNORED = {"ffn": ["re:.*self_attn.*", "re:.*fc$", "lm_head"], "all_linear": ["lm_head"]}
TOKEN_MAP = "token_map.pt"  # SGLang's --speculative-token-map


def to_layout(
    layout: str, draft: DraftConfig, tensors: _Tensors, embedding: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Our tensors with the names of the engine's file.

    `embedding`: the target's [V, H], which TensorRT-LLM's file repeats.
    """
    found = {_prefix(layout, draft) + name: tensor for name, tensor in tensors.items()}
    for name, size in _added_biases(layout, draft).items():
        found[name] = torch.zeros(size, dtype=tensors["fc.weight"].dtype)
    if layout == "trtllm":
        assert embedding is not None
        found["embed_tokens.weight"] = embedding.detach().to("cpu", tensors["fc.weight"].dtype).contiguous()
    return found


def from_layout(layout: str, draft: DraftConfig, tensors: _Tensors) -> dict[str, torch.Tensor]:
    """The inverse of `to_layout`. Tensors that `to_layout` would not write are kept, for the reader to refuse."""
    found = {name.removeprefix(_prefix(layout, draft)): tensor for name, tensor in tensors.items()}
    for name in _added_biases(layout, draft):
        if name in found and not found[name].any():
            del found[name]
    if layout == "trtllm":
        found.pop("embed_tokens.weight", None)
    return found


def _added_biases(layout: str, draft: DraftConfig) -> dict[str, int]:
    """Sizes of the biases that the engine's modules have and the draft does not; they are written as zeros.

    SGLang has one switch for all four attention biases of a layer.
    """
    found = {"fc.bias": draft.hidden_size} if layout in _BIASED and not draft.fc_bias else {}
    if layout == "sglang" and draft.qkv_bias != draft.o_bias:
        for layer in range(draft.num_layers):
            for name in _OUT if draft.qkv_bias else _QKV:
                found[f"layers.{layer}.self_attn.{name}.bias"] = _attention_outputs(draft)[name]
    return found


def _attention_outputs(draft: DraftConfig) -> dict[str, int]:
    keys = draft.num_kv_heads * draft.head_dim
    return {"q_proj": draft.num_heads * draft.head_dim, "k_proj": keys, "v_proj": keys, "o_proj": draft.hidden_size}


def _prefix(layout: str, draft: DraftConfig) -> str:
    """vLLM's class with all norms loads names with a prefix; its class without adds the prefix itself."""
    return "model." if layout == "vllm" and draft.norms == "full" else ""


def layout_config(layout: str, draft: DraftConfig, quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
    """The engine's config.json; empty for our own engine. Raises as `check_runs` does."""
    check_runs(layout, draft, quant)
    if layout == "native":
        return {}
    rope = draft.rope_parameters
    plain = rope.get("rope_type", "default") == "default"
    values = {
        "architectures": [_ARCHITECTURES[layout, draft.norms]],
        "model_type": "llama",
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_hidden_layers": draft.num_layers,
        "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads,
        "head_dim": draft.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": draft.rms_norm_eps,
        "max_position_embeddings": draft.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "attention_bias": draft.o_bias or (layout == "sglang" and draft.qkv_bias),
        "mlp_bias": draft.mlp_bias,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "rope_parameters": rope,
        # For readers before transformers 5.
        "torch_dtype": dtype,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else {key: value for key, value in rope.items() if key != "rope_theta"},
    }
    if layout == "vllm" and draft.qkv_bias != draft.o_bias:
        values["qkv_bias"] = draft.qkv_bias  # takes precedence over attention_bias for q, k and v
    return values if quant.scheme == "none" else values | {"quantization_config": _quantization_config(quant)}


def check_runs(layout: str, draft: DraftConfig, quant: Quant) -> None:
    """Raise UserError, with the reason, for a draft that the engine refuses or silently computes differently."""
    if layout == "native":
        return
    reason = _refusal(layout, draft, quant)
    check(reason is None, f"layout={layout}: {NAMES[layout]} {reason}; use layout=native")


def _refusal(layout: str, draft: DraftConfig, quant: Quant) -> str | None:
    """Why a serving engine cannot run the draft; None if it can."""
    rotated = draft.rope_parameters.get("partial_rotary_factor", 1.0)
    small = quant.scheme != "none"
    reasons = {
        "runs no draft with draft.ffn=moe": draft.ffn == "moe",
        "runs no draft with draft.irope=true": draft.irope,
        f"rotates whole heads, and this draft's partial_rotary_factor is {rotated}": rotated != 1.0,
        "has no class that applies both the first layer's input norm and the final one, and this draft has them "
        "(draft.norms=full)": (layout, draft.norms) not in _ARCHITECTURES,
        "proposes from the target's whole vocabulary, and this draft has a part of it (draft.vocab_size)": bool(
            draft.vocab_size and layout != "sglang"
        ),
        "drops the bias of fc, and this draft has one (draft.fc_bias)": layout == "vllm" and draft.fc_bias,
        "drops the biases of the feed-forward, and this draft has them (draft.mlp_bias)": layout == "sglang"
        and draft.mlp_bias,
        "has no biases in its layers, and this draft has (draft.qkv_bias, draft.o_bias or draft.mlp_bias)": layout
        == "trtllm"
        and (draft.qkv_bias or draft.o_bias or draft.mlp_bias),
        "runs fc as it is, and quant.scope=all_linear quantises it (ffn does not)": layout == "sglang"
        and small
        and quant.scope == "all_linear",
        "reads no weights in compressed-tensors' formats (quant)": layout == "trtllm" and small,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _quantization_config(quant: Quant) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors for a quantised draft."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    if quant.scheme == "int4":
        weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True)
        inputs, form = None, "pack-quantized"
    else:
        weights = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
        inputs = QuantizationArgs(num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True)
        form = "float-quantized"
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=form)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=_IGNORED[quant.scope]
    )
    return config.to_dict()


def expected_shapes(layout: str, draft: DraftConfig, target: Identity) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a serving engine loads for a draft, from the config alone."""
    width, inner = draft.hidden_size, draft.intermediate_size
    heads, kv_heads = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    found: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
    if draft.fc_bias or layout in _BIASED:
        found["fc.bias"] = (width,)
    for layer in range(draft.num_layers):
        own = {
            "self_attn.q_proj.weight": (heads, width),
            "self_attn.k_proj.weight": (kv_heads, width),
            "self_attn.v_proj.weight": (kv_heads, width),
            "self_attn.o_proj.weight": (width, heads),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
            "post_attention_layernorm.weight": (width,),
        }
        if draft.qkv_bias or (layout == "sglang" and draft.o_bias):
            own |= {f"self_attn.{name}.bias": (_attention_outputs(draft)[name],) for name in _QKV}
        if draft.o_bias or (layout == "sglang" and draft.qkv_bias):
            own["self_attn.o_proj.bias"] = (width,)
        if draft.mlp_bias:
            own |= {f"mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")} | {"mlp.down_proj.bias": (width,)}
        if layer > 0 or draft.norms == "full":
            own["input_layernorm.weight"] = (width,)
        found |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    if draft.norms == "full":
        found["norm.weight"] = (width,)
    if layout == "trtllm":
        found["embed_tokens.weight"] = (target.vocab_size, width)
    return {_prefix(layout, draft) + name: shape for name, shape in found.items()}
