"""EAGLE-3 drafts as vLLM and SGLang load them, and in the format of speculators.

vLLM and SGLang load one directory: each reads the fused layers' ids in another place, counted from another layer, and
each applies another norm before the layers behind the first. A window is in config.json for vLLM, and an option of
SGLang's, which counts the positions before a token's own.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from eagle_train.drafts.layouts import (
    TOKENS,
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
    from eagle_train.drafts.eagle3 import Eagle3Config

SLIDING = "sliding_attention"  # the type of a layer with a window
FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
# Layer 0's fused q, k and v have no `self_attn` in their name in either engine.
_ATTENTION = "re:.*(q|k|v|qkv|o)_proj$"


class Eagle3Layout(Layout):
    """Tensors as ours, but for the first layer's name, further norms, and the draft's vocabulary."""

    first = "midlayer."
    """What layer 0's tensors begin with."""
    has_t2d = False

    def refusal(self, draft: "Eagle3Config", quant: Quant) -> str | None:
        return first_of(rotated_in_part(draft, self) | has_sinks(draft) | self.own_reasons(draft, quant))

    def own_reasons(self, draft: "Eagle3Config", quant: Quant) -> dict[str, bool]:
        """Further reasons of one engine."""
        return {}

    def tensors(
        self, draft: "Eagle3Config", tensors: Tensors, repeated: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        found = {re.sub(r"^layers\.0\.", self.first, name): tensor for name, tensor in tensors.items()}
        for name, copied in self._copies(draft).items():
            found[copied] = found[name].clone()
        return found | self._maps(draft)

    def ours(self, draft: "Eagle3Config", tensors: Tensors) -> dict[str, torch.Tensor]:
        found = {
            f"layers.0.{name.removeprefix(self.first)}" if name.startswith(self.first) else name: tensor
            for name, tensor in tensors.items()
        }
        for name, copied in self._copies(draft).items():
            if name in found and copied in found and torch.equal(found[name], found[copied]):
                del found[copied]
        for name, tensor in self._maps(draft).items():
            if name in found and torch.equal(found[name], tensor):
                del found[name]
        return found

    def _copies(self, draft: "Eagle3Config") -> dict[str, str]:
        """Names of norms with the names of their copies: behind layer 0, vLLM applies `input_layernorm`, and SGLang
        `hidden_norm`."""
        deeper = [f"layers.{layer}." for layer in range(1, draft.num_layers)]
        return {f"{each}input_layernorm.weight": f"{each}hidden_norm.weight" for each in deeper}

    def _maps(self, draft: "Eagle3Config") -> dict[str, torch.Tensor]:
        """What the file says of the draft's vocabulary: the token of the draft's i-th is i + d2t[i]."""
        if draft.vocabulary is None:
            return {}
        tokens = torch.tensor(draft.vocabulary)
        known = torch.zeros(draft.target_vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
        maps = {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}
        return maps if self.has_t2d else {"d2t": maps["d2t"]}

    def shapes(self, draft: "Eagle3Config", target: Identity) -> Shapes:
        width, fused = draft.hidden_size, len(draft.target_layers)
        size = draft.vocab_size or draft.target_vocab_size
        found: Shapes = {"fc.weight": (width, fused * width), "norm.weight": (width,), "lm_head.weight": (size, width)}
        if draft.norm_before_fc:
            found["input_norm.weight"] = (fused * width,)
        if draft.fc_norm:
            found |= {f"fc_norm.{number}.weight": (width,) for number in range(fused)}
        for layer in range(draft.num_layers):
            own = layer_shapes(draft, 2 * width if layer == 0 else width)
            own |= {"input_layernorm.weight": (width,), "hidden_norm.weight": (width,)}
            place = self.first if layer == 0 else f"layers.{layer}."
            found |= {place + name: shape for name, shape in own.items()}
        return found | {name: tuple(tensor.shape) for name, tensor in self._maps(draft).items()}


def _layers_config(draft: "Eagle3Config", quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
    """What a config.json says of the layers."""
    values = llama_config(draft, dtype, target.vocab_size) | {
        "attention_bias": False,
        "mlp_bias": False,
        "num_aux_hidden_states": len(draft.target_layers),
    }
    if draft.window is not None:
        values |= {"sliding_window": draft.window, "layer_types": [SLIDING] * draft.num_layers}
    return quantised(values, quant, [_ATTENTION, "re:.*fc$", "lm_head"])


def _draft_config(draft: "Eagle3Config", target: Identity) -> dict[str, Any]:
    """What a config.json says of the draft beside its layers."""
    return {
        "draft_vocab_size": draft.vocab_size or draft.target_vocab_size,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": draft.layers,
        **{name: getattr(draft, name) for name in FLAGS},
    }


class _OneForBoth(Eagle3Layout):
    vllm: ClassVar[Mapping[str, Any]] = {"method": "eagle3"}

    def config(self, draft: "Eagle3Config", quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
        layers = [each - 1 for each in draft.layers or []]  # SGLang: behind this layer, 0 the first
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **_layers_config(draft, quant, dtype, target),
            **_draft_config(draft, target),
            "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
        }


class Vllm(_OneForBoth):
    turns_parts = True
    serves = """\
```bash
vllm serve {target} --speculative-config '{vllm}'
```

Without `method` vLLM guesses it from the draft's path, in which `eagle3` must then stand."""


class _Sglang(_OneForBoth):
    serves = """\
```bash
python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\
    --speculative-draft-model-path {here}{unquantised} \\
    --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4{window}
```"""

    def own_reasons(self, draft: "Eagle3Config", quant: Quant) -> dict[str, bool]:
        whole = quant.scheme != "none" and quant.scope == "all_linear"
        return {
            "begins layer 0's residual before its norm, and this draft's begins after it "
            "(draft.norm_before_residual)": draft.norm_before_residual,
            "leaves fc out where one layer alone is fused (draft.layers)": len(draft.target_layers) == 1,
            "knows no window of the token's own position alone (draft.window=1)": draft.window == 1,
            "runs fc as it is, and quant.scope=all_linear quantises it (ffn does not)": whole,
        }


class Speculators(Eagle3Layout):
    vllm: ClassVar[Mapping[str, Any]] = {"method": "eagle3"}
    first = "layers.0."
    has_t2d = turns_parts = True
    algorithm, architecture = "eagle3", "Eagle3Speculator"
    serves = """\
```bash
vllm serve {here}
```

Its config.json names the target, {named}, which vLLM loads beside it: a name on the hub, or a path from where the
command runs."""

    def own_reasons(self, draft: "Eagle3Config", quant: Quant) -> dict[str, bool]:
        both = draft.fc_norm and draft.norm_before_fc
        return {"has norms of each fused layer (draft.fc_norm) or one over all, and this draft has both": both}

    def config(self, draft: "Eagle3Config", quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
        proposal = {"proposal_type": "greedy", "speculative_tokens": draft.levels or TOKENS}
        return {
            "architectures": [self.architecture],
            "speculators_model_type": self.algorithm,
            "speculators_config": {
                "algorithm": self.algorithm,
                "default_proposal_method": "greedy",
                "proposal_methods": [{**proposal, "accept_tolerance": 0.0, "verifier_accept_k": 1}],
                "verifier": {"name_or_path": target.name, "architectures": []},  # speculators asks for both
            },
            "torch_dtype": dtype,
            **_draft_config(draft, target),
            "transformer_layer_config": _layers_config(draft, quant, dtype, target),
        }


LAYOUTS: dict[str, Layout] = {"vllm": Vllm(), "sglang": _Sglang(), "speculators": Speculators()}
