"""A draft with fewer and larger products, for decoding: q, k and v are one, and so are gate and up.

A product of few rows takes as long as its weights take to be read and its call to be made. Training knows nothing of
it: parameters there are those of checkpoints, and modules may have hooks.
"""

import copy
from itertools import chain
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.models.layers import Attention, DenseFFN, only, rotate
from eagle_train.ops.linear import concat_outputs
from eagle_train.ops.rule import Attend

M = TypeVar("M", bound=nn.Module)


def fuse_products(draft: M) -> M:
    """The draft with one product for what reads the same input; `draft` is left alone, and shares what stays.

    Quantised modules are to be given before they use a device's kernel.
    """
    shared = {id(tensor): tensor for tensor in chain(draft.parameters(), draft.buffers())}
    draft = copy.deepcopy(draft, shared)
    for parent in list(draft.modules()):
        for name, module in parent.named_children():
            if type(module) in FUSED:
                setattr(parent, name, FUSED[type(module)](module))
    return draft


class FusedAttention(nn.Module):
    """`Attention` with one product for q, k and v, and one rotation for q and k."""

    def __init__(self, plain: Attention):
        super().__init__()
        self.layer, self.head_dim, self.uses_rope, self.rule = plain.layer, plain.head_dim, plain.uses_rope, plain.rule
        self.num_heads, self.num_kv_heads, self.sinks = plain.num_heads, plain.num_kv_heads, plain.sinks
        self.qkv_proj = concat_outputs(plain.q_proj, plain.k_proj, plain.v_proj)
        self.o_proj = plain.o_proj

    def forward(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Views and slices: `unflatten` and `split` take several times as long to be called.
        heads = self.qkv_proj(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
        turned = self.num_heads + self.num_kv_heads
        qk, v = heads[:, :turned], heads[:, turned:]
        qk = rotate(qk, rotary) if self.uses_rope else qk
        rule = self.rule.having(self.sinks)
        out = attend(self.layer, qk[:, : self.num_heads], qk[:, self.num_heads :], v, rule)
        return self.o_proj(only(out.transpose(1, 2).flatten(2), wanted))


class FusedFFN(nn.Module):
    """`DenseFFN` with one product for gate and up."""

    def __init__(self, plain: DenseFFN):
        super().__init__()
        self.gate_up_proj = concat_outputs(plain.gate_proj, plain.up_proj)
        self.down_proj = plain.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


FUSED = {Attention: FusedAttention, DenseFFN: FusedFFN}
