"""A draft that is divided over the ranks of one target: each has some of the heads and of the feed-forward's columns.

What a layer's two halves add up to is summed over the ranks, and so is the fusion at the draft's beginning. A draft
that proposes all levels at once is small beside the LM head, and stays whole on each rank. Knows nothing of targets,
trees or requests.
"""

from typing import NamedTuple

import torch
from torch import nn

from eagle_train.drafts import Draft
from eagle_train.errors import OptionError
from eagle_train.inference.parallel.cost import Speeds, pays
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.fused import FusedAttention, FusedFFN
from eagle_train.models.layers import MoEFFN
from eagle_train.ops.linear import Linear, QuantisedLinear, linear


def reason_against(draft: Draft, size: int) -> str | None:
    """Why a draft cannot be divided over so many ranks, in words; None if it can."""
    config = draft.config
    if config.at_once:
        return None
    if any(isinstance(module, QuantisedLinear) for module in draft.modules()):
        return "its weights are quantised"
    if any(isinstance(module, MoEFFN) for module in draft.modules()):
        return "it has experts"
    sizes = {
        "key/value heads": config.num_kv_heads,
        "columns of the feed-forward": config.intermediate_size,
        "inputs of fc": config.fc_inputs,
    }
    return next((f"it has {number} {name}" for name, number in sizes.items() if number % size), None)


def check_divides(divide: bool | None, draft: Draft, size: int) -> None:
    """Raise OptionError where a draft is to be divided that cannot be."""
    reason = reason_against(draft, size) if divide and size > 1 else None
    if reason is not None:
        raise OptionError(f"divide_draft=True: the draft cannot be divided over {size} ranks: {reason}; must be False")


def collectives(draft: Draft) -> int:
    """How often the ranks of a divided draft wait for each other in a forward."""
    return 0 if draft.config.at_once else 1 + 2 * draft.config.num_layers


def divided_bytes(draft: Draft) -> int:
    """Bytes of a draft's weights that a forward reads and of which each rank keeps a part, without those of LM heads of
    its own."""
    if draft.config.at_once:
        return 0
    own = (draft.own_head(level) for level in range(draft.config.own_heads))
    whole = sum(each.numel() * each.itemsize for each in draft.parameters())
    inside = whole - sum(head.num_bytes for head in own if head)
    return inside // draft.config.whole_passes  # of several modules a forward runs one


class Division(NamedTuple):
    """What is divided over the ranks."""

    lm_head: bool  # of validation
    draft: bool  # with the LM head that proposes its tokens


def division(
    draft: Draft | None,
    head_bytes: int,
    proposing_bytes: int,
    size: int,
    lm_head: bool | None,
    of_draft: bool | None,
    speeds: Speeds | None,
) -> Division:
    """What `size` ranks divide of an LM head of so many bytes, and of a draft where it can be, with the
    `proposing_bytes` of what it proposes with: as `lm_head` and `of_draft` say (`EngineConfig`); None: where that is
    faster by `speeds`."""

    def is_divided(wanted: bool | None, num_bytes: int, waits: int) -> bool:
        return pays(num_bytes, waits, size, speeds) if wanted is None and speeds is not None else bool(wanted)

    divides = False
    if draft is not None and reason_against(draft, size) is None:
        divides = is_divided(of_draft, proposing_bytes + divided_bytes(draft), 1 + collectives(draft))
    return Division(is_divided(lm_head, head_bytes, 1), divides)


@torch.no_grad()
def divide_draft(draft: Draft, ranks: Ranks) -> None:
    """Keep of a draft with fused products (`fuse_products`) what this rank has of it, in place."""
    if draft.config.at_once:
        return
    for name, module in list(draft.named_modules()):
        if name.rpartition(".")[2] == "fc":
            assert isinstance(module, Linear)
            draft.set_submodule(name, _summed(module, ranks, takes_whole=True))
    for module in draft.modules():
        if isinstance(module, FusedAttention):
            _divide_attention(module, ranks)
        elif isinstance(module, FusedFFN):
            inner = draft.config.intermediate_size
            module.gate_up_proj = _outputs(module.gate_up_proj, [_part(inner, ranks), _part(inner, ranks, inner)])
            module.down_proj = _summed(module.down_proj, ranks)


def _divide_attention(module: FusedAttention, ranks: Ranks) -> None:
    q, kv = module.num_heads * module.head_dim, module.num_kv_heads * module.head_dim
    parts = [_part(q, ranks), _part(kv, ranks, q), _part(kv, ranks, q + kv)]
    module.qkv_proj, module.o_proj = _outputs(module.qkv_proj, parts), _summed(module.o_proj, ranks)
    if module.sinks is not None:
        module.sinks = nn.Parameter(module.sinks[_part(module.num_heads, ranks)], requires_grad=False)
    module.num_heads //= ranks.size
    module.num_kv_heads //= ranks.size


def _part(size: int, ranks: Ranks, start: int = 0) -> slice:
    """This rank's of `size` rows or columns from `start` on."""
    own = size // ranks.size
    return slice(start + own * ranks.rank, start + own * (ranks.rank + 1))


def _outputs(module: Linear | QuantisedLinear, parts: list[slice]) -> Linear:
    """The module with these outputs alone, one part after the other."""
    assert isinstance(module, Linear)
    one = Linear(module.weight.shape[1], 1, bias=False, device="meta")
    one.weight = nn.Parameter(torch.cat([module.weight[part] for part in parts]), requires_grad=False)
    if module.bias is not None:
        one.bias = nn.Parameter(torch.cat([module.bias[part] for part in parts]), requires_grad=False)
    one.out_features = len(one.weight)
    return one


def _summed(module: Linear, ranks: Ranks, takes_whole: bool = False) -> "_Summed":
    own = _part(module.weight.shape[1], ranks)
    return _Summed(module.weight[:, own].contiguous(), module.bias, own if takes_whole else slice(None), ranks)


class _Summed(Linear):
    """A product over this rank's inputs, summed over the ranks. `taken`: of what it is given."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, taken: slice, ranks: Ranks):
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)
        self._taken, self._ranks = taken, ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._ranks.sum(linear(x[..., self._taken], self.weight))
        return out if self.bias is None else out + self.bias
