"""What a target's config says of its cost: counts of weights and widths, from a model without memory for its weights.

Knows nothing of drafts, GPUs or the length of a run.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle_train.models.checkpoint_quantisation import quantization_config_of
from eagle_train.models.family import skeleton
from eagle_train.models.forward import decoder_of
from eagle_train.models.head import head_of
from eagle_train.models.patches import rounded_to_fp8
from eagle_train.models.shapes import heads_of, widest


@dataclass(frozen=True)
class TargetShape:
    """Counts of weights and widths. `active`: the decoder's weights that one token is multiplied with."""

    parameters: int
    active: int
    largest_layer: int
    layers: int
    hidden: int
    vocabulary: int
    attention: int  # query heads * head_dim
    intermediate: int  # of the experts that a token goes through together
    tied: bool
    rounded: int = 0  # weights that train.target_quant=fp8 rounds
    rounded_rows: int = 0  # outputs of these, each of which has a scale
    bits: float | None = None  # of a layer's weight where the checkpoint is quantised, its scales included
    in_experts: int = 0  # the decoder's weights in routed experts
    chosen: float = 1.0  # the share of the experts that a token goes through

    def bytes_of(self, dtype: torch.dtype) -> float:
        """Of a layer's weight, in `dtype` where the checkpoint is not quantised."""
        return dtype.itemsize if self.bits is None else self.bits / 8

    def read_by(self, tokens: int) -> float:
        """The decoder's weights that a forward of so many tokens reads, each of which chooses its experts by chance."""
        return self.active + self.in_experts * (1 - (1 - self.chosen) ** tokens - self.chosen)

    def without_layers(self) -> "TargetShape":
        """Of a target whose states are on disk: embedding and LM head."""
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2)
        of_layers = ("active", "largest_layer", "layers", "attention", "intermediate")
        none: dict[str, Any] = dict.fromkeys((*of_layers, "rounded", "rounded_rows", "in_experts"), 0)
        return replace(self, parameters=ends, bits=None, **none)

    @classmethod
    def of(cls, config: Any, trust_remote_code: bool = False, place: str = "target") -> "TargetShape":
        """Counted on the model built without memory for its weights. `place` begins the message of a UserError."""
        model: Any = skeleton(config, trust_remote_code, place)
        text = config.get_text_config()
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts: int = next((count for name in names if (count := getattr(text, name, None))), 1)
        numbers = (getattr(text, name, None) for name in ("num_experts_per_tok", "top_k_experts"))
        chosen = min(experts, max((widest(each) or 1 for each in numbers if each), default=1))  # or one per layer
        head: Any = head_of(model)
        ends = {id(model.get_input_embeddings().weight), id(head.weight)}
        looked_up = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        ours = {id(parameter) for parameter in decoder_of(model).parameters()} - ends - looked_up  # no vision tower's
        active, in_experts, layers = 0.0, 0, dict[str | None, int]()
        for name, parameter in model.named_parameters():
            if id(parameter) not in ours:
                continue
            number = next((part for part in name.split(".") if part.isdigit()), None)
            layers[number] = layers.get(number, 0) + parameter.numel()
            if parameter.ndim >= 2:
                routed = ".experts." in name
                active += parameter.numel() * (chosen / experts if routed else 1)
                in_experts += parameter.numel() if routed else 0
        heads = [heads_of(text, layer) for layer in range(text.num_hidden_layers)]
        rounded = [module.weight for module in rounded_to_fp8(model).values()]
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            active=round(active),
            largest_layer=max(layers.values()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            vocabulary=text.vocab_size,
            attention=max(each.queries * each.width for each in heads),
            intermediate=(widest(getattr(text, "intermediate_size", None)) or 0) * chosen,
            tied=len(ends) == 1,
            rounded=sum(weight.numel() for weight in rounded),
            rounded_rows=sum(len(weight) for weight in rounded),
            bits=_bits_of(quantization_config_of(config)),
            in_experts=in_experts,
            chosen=chosen / experts,
        )


def _bits_of(quantisation: Any) -> float | None:
    """Bits of a weight in a quantised checkpoint, with a 16-bit scale for every 64 weights; None if not quantised."""
    if not quantisation:
        return None
    groups = (group.get("weights") or {} for group in (quantisation.get("config_groups") or {}).values())
    said = [quantisation.get("bits"), *(weights.get("num_bits") for weights in groups)]
    small = quantisation.get("load_in_4bit") or "fp4" in str(quantisation.get("quant_method")) or 4 in said
    return (4 if small else 8) + 16 / 64
