"""The layout of a serving engine for a kind of draft: tensor names, config.json, and which drafts it cannot run.

Each kind has its own, taken from the engines' own loaders, which tests replay. Here is what they share. Knows nothing
of files or of rounding.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.target import Identity
from eagle_train.ops.weight_codes import GROUP

if TYPE_CHECKING:
    from eagle_train.drafts.kind import DraftConfig

Tensors = Mapping[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

# Linear modules that stay unquantised, in the syntax of compressed-tensors. Expressions match from the start of an
# engine's module name, which has prefixes, fuses q, k and v, and in vLLM adds the number of target layers.
_KEPT = {"ffn": ["re:.*self_attn.*", "re:.*fc$", "lm_head"], "all_linear": ["lm_head"]}
WEIGHTS = "model.safetensors"
TOKENS = 3  # that an engine is told to draft a round, of drafts without a number of their own
TOKEN_MAP = "token_map.pt"  # SGLang's --speculative-token-map


class Layout:
    """What an engine loads for a kind of draft. `draft`: of that kind."""

    serves = ""
    """How it is served, in Markdown: {target} and {here}, which lead to both from anywhere, the target as it was
    {named} in training, what {vllm} is told, and SGLang with options ({unquantised}, {token_map}, {window}), how many
    {levels} are drafted at most, and of how many {blocks} each of Medusa's heads is, are put in."""
    vllm: ClassVar[Mapping[str, Any]] = {}
    """What vLLM's `speculative_config` says of such drafts, beside path and number of tokens; empty: none of vLLM's."""
    reads_hub = True
    """Whether its commands take names of the hub; else directories alone."""
    weights = WEIGHTS
    """The file of the tensors."""
    has_token_map = False
    """Whether a file beside the weights says the draft's vocabulary."""
    turns_parts = False
    """Whether its layers turn a part of each head where `partial_rotary_factor` says so."""

    def speculative_config(self, model: str, tokens: int) -> dict[str, Any]:
        """vLLM's argument of this name, for a draft at `model` of which it takes so many `tokens` a round."""
        assert self.vllm
        return {"method": self.vllm["method"], "model": model, "num_speculative_tokens": tokens} | dict(self.vllm)

    def repeats(self, draft: Any) -> str | None:
        """What of the target's the engine's file repeats: its `embedding` or its `LM head`, or nothing."""
        return None

    def refusal(self, draft: Any, quant: Quant) -> str | None:
        """Why the engine cannot run the draft, in words that follow its name; None if it can."""
        raise NotImplementedError

    def config(self, draft: Any, quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
        """The engine's config.json."""
        raise NotImplementedError

    def tensors(self, draft: Any, tensors: Tensors, repeated: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Our tensors with the names of the engine's file. `repeated` [V, H]: see `repeats`."""
        raise NotImplementedError

    def ours(self, draft: Any, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The inverse of `tensors`. Tensors that it would not write are kept, for the reader to refuse."""
        raise NotImplementedError

    def shapes(self, draft: Any, target: Identity) -> Shapes:
        """Name and shape of every tensor that the engine loads for a draft, from the config alone."""
        raise NotImplementedError


class Refused(Layout):
    """Of an engine that runs no draft of a kind. `reason`: in words that follow its name."""

    def __init__(self, reason: str):
        self._reason = reason

    def refusal(self, draft: Any, quant: Quant) -> str:
        return self._reason


def first_of(reasons: Mapping[str, bool]) -> str | None:
    """The first reason that holds."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def rotated_in_part(draft: "DraftConfig", layout: Layout) -> dict[str, bool]:
    """The reason that some engines' drafts turn no part of a head."""
    rotated = draft.rope_parameters.get("partial_rotary_factor", 1.0)
    said = f"rotates whole heads, and this draft's partial_rotary_factor is {rotated}"
    return {said: rotated != 1.0 and not layout.turns_parts}


def has_sinks(draft: "DraftConfig") -> dict[str, bool]:
    """The reason that no engine's Llama has sinks."""
    return {"has no sinks in its Llama layers, and this draft has them (draft.sink)": draft.sink}


def llama_config(draft: "DraftConfig", dtype: str, vocab_size: int) -> dict[str, Any]:
    """The part of a config.json that says what Llama layers compute, for readers before and after transformers 5."""
    rope = draft.rope_parameters
    plain = rope.get("rope_type", "default") == "default"
    return {
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
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "rope_parameters": rope,
        # For readers before transformers 5.
        "torch_dtype": dtype,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else {key: value for key, value in rope.items() if key != "rope_theta"},
    }


def layer_shapes(draft: "DraftConfig", inputs: int) -> Shapes:
    """Of a Llama layer's matrices and of the norm in its middle; its queries, keys and values read `inputs` columns."""
    width, inner = draft.hidden_size, draft.intermediate_size
    heads, kv_heads = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    return {
        "self_attn.q_proj.weight": (heads, inputs),
        "self_attn.k_proj.weight": (kv_heads, inputs),
        "self_attn.v_proj.weight": (kv_heads, inputs),
        "self_attn.o_proj.weight": (width, heads),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "post_attention_layernorm.weight": (width,),
    }


def quantised(values: dict[str, Any], quant: Quant, kept: list[str] | None = None) -> dict[str, Any]:
    """A config.json with the `quantization_config` of a draft's own quantisation, where it has one. `kept`: what it
    leaves as it is where the feed-forward alone is quantised; None: for names as Llama's."""
    if quant.scheme == "none":
        return values
    ignored = _KEPT[quant.scope] if kept is None or quant.scope == "all_linear" else kept
    return values | {"quantization_config": _quantization_config(quant, ignored)}


def _quantization_config(quant: Quant, ignored: list[str]) -> dict[str, Any]:
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
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=ignored
    )
    return config.to_dict()
