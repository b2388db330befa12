"""The draft with fewer products against the draft it was made of."""

import pytest
import torch
from torch import nn

from eagle_train.models.draft_quantisation import Quant, quantise_draft
from eagle_train.models.fused import FusedAttention, FusedFFN, fuse_products
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.linear import QuantisedLinear
from tests.support.tiny import shared_target, tiny_draft, tiny_target

VARIANTS = {
    "eagle1": {},
    "full": {"norms": "full", "fc_bias": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "experts": {"ffn": "moe", "num_experts": 3},
    "irope": {"irope": True, "attention_chunk": 4},
    "window, sink": {"window": 3, "sink": True},
}
LENGTH = 9


def states(draft: nn.Module) -> torch.Tensor:
    """The draft's hidden states at random slots, some of them few, so that every way of multiplying is used."""
    generator = torch.Generator().manual_seed(0)
    width, found = draft.config.hidden_size, []
    for length in (1, 4, LENGTH):
        embeddings, hidden = torch.randn(2, 1, length, width, generator=generator)
        found.append(draft(embeddings, hidden, torch.arange(length)[None], packed_attention([[length]])))
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_draft(variant):
    draft = tiny_draft(shared_target(), **VARIANTS[variant])
    names, ours = draft.state_dict().keys(), fuse_products(draft)
    torch.testing.assert_close(states(ours), states(draft))
    assert draft.state_dict().keys() == names
    for kind in (FusedAttention, FusedFFN):
        assert any(isinstance(module, kind) for module in ours.modules())
    assert ours.fc.weight is draft.fc.weight


@pytest.mark.parametrize("scope", ["ffn", "all_linear"])
@pytest.mark.parametrize("scheme", ["int4", "fp8"])
def test_equals_the_quantised_draft(scheme, scope):
    target = tiny_target(hidden_size=128, intermediate_size=256, head_dim=32)
    draft = quantise_draft(tiny_draft(target, num_layers=1, qkv_bias=True, mlp_bias=True), Quant(scheme, scope))
    ours = fuse_products(draft)
    torch.testing.assert_close(states(ours), states(draft), rtol=1e-4, atol=1e-4)
    separate, one = (sum(isinstance(m, QuantisedLinear) for m in each.modules()) for each in (draft, ours))
    assert one < separate
