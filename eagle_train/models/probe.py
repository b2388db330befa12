"""Whether a model with our attention computes what it computes with transformers' own. Raises UserError where not.

Catches a head with a scaling we do not know, the wrong hidden state, an attention rule that got lost, an attention that
cannot be reached, and what a layer carries from token to token other than by `attend`, of which neither packing nor
decoding would know. DESIGN section 3.4.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from eagle_train.errors import check, foreign
from eagle_train.models.forward import OURS
from eagle_train.models.patches import Undo, use_fast_modules
from eagle_train.models.shapes import KVShape
from eagle_train.models.weights import full_tensor
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.rule import Attend, Rule

TOKENS = 24  # of a document that is read
BOUNDS = {torch.float32: 1e-3}  # of relative errors
LOW_PRECISION = 5e-2
ROUNDINGS = 2  # times what a rounding of each attention's output does to a model's own logits
UNREACHED = "this family ({}) cannot be run with attention from outside"

LogitsOf = Callable[[torch.Tensor, torch.Tensor, Attend], torch.Tensor]
"""logits_of(tokens [B, T], positions [B, T], attend) -> [B, T, V], by way of the hidden states."""


@dataclass
class Layers:
    """What was seen of layers' attention in a forward, by layer."""

    kv_shapes: dict[int, KVShape] = field(default_factory=dict)  # of those that have keys and values of their own
    given: dict[int, int] = field(default_factory=dict)  # whose keys and values the others are given (Gemma 4)
    calls: Counter[int] = field(default_factory=Counter)

    def noted(self, attend: Attend) -> Attend:
        """`attend` for one forward, with a note of each call."""
        seen: dict[tuple, tuple[int, torch.Tensor, torch.Tensor]] = {}  # kept, so that no other lies in their place

        def noting(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
            place = tuple((x.data_ptr(), x.shape, x.stride()) for x in (k, v))
            owner, *_ = seen.setdefault(place, (layer, k, v))
            if owner == layer:
                self.kv_shapes[layer] = KVShape(k.shape[1], k.shape[3], v.shape[3])
            else:
                self.given[layer] = owner
            self.calls[layer] += 1
            return attend(layer, q, k, v, rule)

        return noting


@torch.no_grad()
def probe(model: PreTrainedModel, logits_of: LogitsOf, tokens: torch.Tensor, place: str) -> tuple[Layers, Undo]:
    """Compare a document's logits with the model's own, alone and behind itself in a packed row.

    `tokens`: int64 [1, T]; `place`: what messages begin with. The model is left with our attention and modules; what
    takes the modules back is returned beside what was seen. Raises UserError.
    """
    family, length = model.config.model_type, tokens.shape[1]
    positions = torch.arange(length, device=tokens.device)[None]
    alone = f"{place}: this family ({family}) cannot be run on text alone"
    with foreign(alone):
        model.set_attn_implementation("eager")
        own = full_tensor(model(input_ids=tokens, use_cache=False).logits).float()
    undo = use_fast_modules(model)  # what is ours from here on must give the same
    layers = Layers()
    attend = layers.noted(packed_attention([[length, length]]))
    with foreign(f"{place}: {UNREACHED.format(family)}"):
        model.set_attn_implementation(OURS)
        both = logits_of(tokens.repeat(1, 2), positions.repeat(1, 2), attend)
    unreached = ", for no layer's attention can be reached"
    ours, behind = both.float().chunk(2, dim=1)
    error, bound = _relative_error(ours, own), _error_bound(model.dtype)
    if error > bound:
        with foreign(alone):
            bound = max(bound, ROUNDINGS * _rounding(model, tokens, own))
    check(
        error <= bound,
        f"{place}: the LM head applied to the hidden states misses the model's own logits by {error:.1%}"
        f"{'' if layers.calls else unreached}; this family ({family}) is not supported",
    )
    check(bool(layers.calls), f"{place}: no attention of this family ({family}) can be reached; it is not supported")
    error = _relative_error(behind, ours)
    check(
        error <= _error_bound(model.dtype),
        f"{place}: what stands before a document in its row changes its logits by {error:.1%}; this family ({family}), "
        "which keeps a state beside its attention's keys and values, is not supported",
    )
    return layers, undo


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error of a token's logits, the median over tokens; infinite where it is no number.

    Not the mean: which experts a token chooses may depend on a rounding, and then it is far off for no fault of ours.
    """
    size = expected.norm(dim=-1).clamp(min=torch.finfo(expected.dtype).tiny)  # 0 of a fresh model's padding token
    error = ((found - expected).norm(dim=-1) / size).median().item()
    return error if error == error else float("inf")


def _rounding(model: PreTrainedModel, tokens: torch.Tensor, own: torch.Tensor) -> float:
    """The relative error of a model's own logits [1, T, V] when each attention's output is off by a rounding; 0 where
    no attention is found.

    Two attentions that compute the same round differently, and a model makes more of it the wider and deeper it is:
    random Llamas in bf16 miss by 1.4 % with 32 layers x 512, and by 6 % with the shapes of 8 billion parameters on a
    GPU, beyond LOW_PRECISION. This is 1.2 to 1.7 times what ours misses by on a CPU, from 8 x 512 to 32 x 2,048.
    """
    hooks = [module.register_forward_hook(_off_by_a_rounding) for module in model.modules() if _is_attention(module)]
    model.set_attn_implementation("eager")
    other = full_tensor(model(input_ids=tokens, use_cache=False).logits).float()
    model.set_attn_implementation(OURS)
    for hook in hooks:
        hook.remove()
    return _relative_error(other, own)


def _is_attention(module: Any) -> bool:
    """Whether it is the innermost module that knows its layer, as transformers' attentions do."""
    return hasattr(module, "layer_idx") and not any(hasattr(child, "layer_idx") for child in module.children())


def _off_by_a_rounding(module: Any, _: Any, output: Any) -> Any:
    """The attention's output, alone or first in a tuple, with noise of half the dtype's last bit; for each layer its
    own, the same on every rank. What an indexer beside it returns are numbers of keys, which stay."""
    first, *others = output if isinstance(output, tuple) else (output,)
    if not first.is_floating_point():
        return output
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(module.layer_idx))
    first = first + first * (noise * torch.finfo(first.dtype).eps / 2).to(first)
    return (first, *others) if isinstance(output, tuple) else first


def _error_bound(dtype: torch.dtype) -> float:
    return BOUNDS.get(dtype, LOW_PRECISION)
