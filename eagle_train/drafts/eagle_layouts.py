"""EAGLE drafts as vLLM, SGLang and TensorRT-LLM load them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from eagle_train.drafts.layouts import (
    Layout,
    Shapes,
    Tensors,
    first_of,
    has_sinks,
    layer_shapes,
    llama_config,
    quantised,
    rotated_in_part,
)
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.target import Identity

if TYPE_CHECKING:
    from eagle_train.drafts.eagle import EagleConfig

_QKV, _OUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",)


class EagleLayout(Layout):
    """Names as ours, without a prefix. `architectures`: by `EagleConfig.norms`. `adds_bias`: the engine's `fc` has a
    bias: without one in the file it is random, or an error."""

    architectures: ClassVar[dict[str, str]]
    adds_bias = False
    needs_embedding = False
    one_bias_switch = False
    """Whether one switch is for all four attention biases of a layer."""

    def repeats(self, draft: "EagleConfig") -> str | None:
        return "embedding" if self.needs_embedding else None

    def refusal(self, draft: "EagleConfig", quant: Quant) -> str | None:
        no_class = draft.norms not in self.architectures
        return first_of(
            {
                "runs no draft with draft.ffn=moe": draft.ffn == "moe",
                "runs no draft with draft.irope=true": draft.irope,
                # vLLM looks for the types of an EAGLE draft's layers behind those of the target's.
                "gives an EAGLE draft no window of its own, and this one has one (draft.window)": bool(draft.window),
                **has_sinks(draft),
                **rotated_in_part(draft, self),
                "has no class that applies both the first layer's input norm and the final one, and this draft has "
                "them (draft.norms=full)": no_class,
                "proposes from the target's whole vocabulary, and this draft has a part of it (draft.vocab_size)": bool(
                    draft.vocab_size and not self.has_token_map
                ),
                **self.own_reasons(draft, quant),
            }
        )

    def own_reasons(self, draft: "EagleConfig", quant: Quant) -> dict[str, bool]:
        """Further reasons of one engine."""
        raise NotImplementedError

    def config(self, draft: "EagleConfig", quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
        both = draft.o_bias or (self.one_bias_switch and draft.qkv_bias)
        values = {
            "architectures": [self.architectures[draft.norms]],
            **llama_config(draft, dtype, target.vocab_size),
            "attention_bias": both,
            "mlp_bias": draft.mlp_bias,
        }
        return quantised(values, quant)

    def tensors(self, draft: "EagleConfig", tensors: Tensors, repeated: torch.Tensor | None) -> dict[str, torch.Tensor]:
        found = {self.prefix(draft) + name: tensor for name, tensor in tensors.items()}
        dtype = tensors["layers.0.post_attention_layernorm.weight"].dtype  # `fc` may be in few bits
        found |= {name: torch.zeros(size, dtype=dtype) for name, size in self._added(draft).items()}
        if self.needs_embedding:
            assert repeated is not None
            found["embed_tokens.weight"] = repeated.detach().to("cpu", dtype).contiguous()
        return found

    def ours(self, draft: "EagleConfig", tensors: Tensors) -> dict[str, torch.Tensor]:
        found = {name.removeprefix(self.prefix(draft)): tensor for name, tensor in tensors.items()}
        for name in self._added(draft):
            if name in found and not found[name].any():
                del found[name]
        if self.needs_embedding:
            found.pop("embed_tokens.weight", None)
        return found

    def prefix(self, draft: "EagleConfig") -> str:
        """Before the names in the engine's file."""
        return ""

    def shapes(self, draft: "EagleConfig", target: Identity) -> Shapes:
        width, inner = draft.hidden_size, draft.intermediate_size
        found: Shapes = {"fc.weight": (width, 2 * width)}
        if draft.fc_bias or self.adds_bias:
            found["fc.bias"] = (width,)
        for layer in range(draft.num_layers):
            own = layer_shapes(draft, width)
            if draft.qkv_bias or (self.one_bias_switch and draft.o_bias):
                own |= {f"self_attn.{name}.bias": (_attention_outputs(draft)[name],) for name in _QKV}
            if draft.o_bias or (self.one_bias_switch and draft.qkv_bias):
                own["self_attn.o_proj.bias"] = (width,)
            if draft.mlp_bias:
                own |= {f"mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")} | {"mlp.down_proj.bias": (width,)}
            if layer > 0 or draft.norms == "full":
                own["input_layernorm.weight"] = (width,)
            found |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
        if draft.norms == "full":
            found["norm.weight"] = (width,)
        if self.needs_embedding:
            found["embed_tokens.weight"] = (target.vocab_size, width)
        return {self.prefix(draft) + name: shape for name, shape in found.items()}

    def _added(self, draft: "EagleConfig") -> dict[str, int]:
        """Sizes of the biases that the engine's modules have and the draft does not; they are written as zeros."""
        found = {"fc.bias": draft.hidden_size} if self.adds_bias and not draft.fc_bias else {}
        if self.one_bias_switch and draft.qkv_bias != draft.o_bias:
            for layer in range(draft.num_layers):
                for name in _OUT if draft.qkv_bias else _QKV:
                    found[f"layers.{layer}.self_attn.{name}.bias"] = _attention_outputs(draft)[name]
        return found


def _attention_outputs(draft: "EagleConfig") -> dict[str, int]:
    keys = draft.num_kv_heads * draft.head_dim
    return {"q_proj": draft.num_heads * draft.head_dim, "k_proj": keys, "v_proj": keys, "o_proj": draft.hidden_size}


class _Vllm(EagleLayout):
    turns_parts = True
    vllm: ClassVar[Mapping[str, Any]] = {"method": "eagle"}
    architectures: ClassVar[dict[str, str]] = {  # vLLM puts `Eagle` before the first
        "eagle1": "LlamaForCausalLM",
        "full": "EagleMistralForCausalLM",
    }
    serves = """\
```bash
vllm serve {target} --speculative-config '{vllm}'
```"""

    def own_reasons(self, draft: "EagleConfig", quant: Quant) -> dict[str, bool]:
        return {"drops the bias of fc, and this draft has one (draft.fc_bias)": draft.fc_bias}

    def config(self, draft: "EagleConfig", quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
        values = super().config(draft, quant, dtype, target)
        if draft.qkv_bias != draft.o_bias:
            values["qkv_bias"] = draft.qkv_bias  # takes precedence over attention_bias for q, k and v
        return values

    def prefix(self, draft: "EagleConfig") -> str:
        """Its class with all norms loads names with a prefix; its class without adds the prefix itself."""
        return "model." if draft.norms == "full" else ""


class _Sglang(EagleLayout):
    architectures: ClassVar[dict[str, str]] = {"eagle1": "LlamaForCausalLMEagle"}
    adds_bias = one_bias_switch = has_token_map = True
    serves = """\
```bash
python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE \\
    --speculative-draft-model-path {here}{unquantised} \\
    --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4{token_map}
```"""

    def own_reasons(self, draft: "EagleConfig", quant: Quant) -> dict[str, bool]:
        whole = quant.scheme != "none" and quant.scope == "all_linear"
        return {
            "drops the biases of the feed-forward, and this draft has them (draft.mlp_bias)": draft.mlp_bias,
            "runs fc as it is, and quant.scope=all_linear quantises it (ffn does not)": whole,
        }


class _Trtllm(EagleLayout):
    architectures: ClassVar[dict[str, str]] = {"eagle1": "LlamaForCausalLM"}
    adds_bias = needs_embedding = True
    reads_hub = False
    serves = """\
```bash
python examples/eagle/convert_checkpoint.py --model_dir {target} --eagle_model_dir {here} \\
    --num_eagle_layers 4 --max_draft_len 63 --max_non_leaves_per_layer 10 --output_dir converted
```

This is for TensorRT-LLM's TensorRT backend, and runs in a clone of it, of a release up to 1.2."""

    def own_reasons(self, draft: "EagleConfig", quant: Quant) -> dict[str, bool]:
        biased = draft.qkv_bias or draft.o_bias or draft.mlp_bias
        return {
            "has no biases in its layers, and this draft has (draft.qkv_bias, draft.o_bias or draft.mlp_bias)": biased,
            "reads no weights in compressed-tensors' formats (quant)": quant.scheme != "none",
        }


LAYOUTS: dict[str, Layout] = {"vllm": _Vllm(), "sglang": _Sglang(), "trtllm": _Trtllm()}
