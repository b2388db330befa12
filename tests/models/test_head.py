"""The LM head in few bits: the logits of the weight that its codes stand for, whatever a family makes of them."""

import pytest
import torch
import torch.nn.functional as F

from eagle_train.models.draft_quantisation import SCHEMES
from eagle_train.models.head import LMHead, QuantisedLMHead, quantised
from eagle_train.ops.weight_codes import dequantise, quantise_rows_fp8

INPUTS = 128


def head_of(tokens: int, has_bias: bool = False, **family) -> LMHead:
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(tokens, generator=generator) if has_bias else None
    return LMHead(torch.randn(tokens, INPUTS, generator=generator) / 8, bias, **family)


def states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, INPUTS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", [{}, {"scale": 0.25}, {"softcap": 2.0}, {"scale": 4.0, "softcap": 3.0}])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tokens", [96, 90, 3])  # 16 is what the products want
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_weight_that_its_codes_stand_for(scheme, tokens, has_bias, family):
    head, x = head_of(tokens, has_bias, **family), states(2, 3)
    found = quantised(head, SCHEMES[scheme])(x)
    codes, scales = SCHEMES[scheme].rounded(head.weight, None)
    seen = dequantise(*quantise_rows_fp8(x.flatten(0, 1))).view_as(x) if scheme == "fp8" else x
    logits = F.linear(seen, dequantise(codes, scales), head.bias) * head.scale
    wanted = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    assert (found.shape, found.dtype) == ((2, 3, tokens), x.dtype)
    bits = 2**-7 if scheme == "int4" else 1e-5  # the INT4 product's activations and results are bf16
    assert (found - wanted).norm() <= bits * wanted.norm()
    error = (found - head(x)).norm() / head(x).norm()
    assert 0 < error < 0.2


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_heads_dtype_and_holds_no_more_than_its_codes(scheme, dtype):
    head = LMHead(head_of(96).weight.to(dtype))
    small = quantised(head, SCHEMES[scheme])
    assert small(states(4)).dtype == dtype
    assert (small.weight.shape, small.weight.dtype, small.weight.is_meta) == (head.weight.shape, dtype, True)
    held = sum(buffer.nbytes for buffer in small.product.buffers())
    own = {"int4": 96 * INPUTS // 2 + 96 * 4, "fp8": 96 * INPUTS * dtype.itemsize + 96 * 4}  # a CPU widens FP8
    assert held == own[scheme]
    assert not any(buffer.requires_grad for buffer in small.product.buffers())


def test_a_large_vocabulary_is_rounded_by_parts(monkeypatch):
    head, x = head_of(90), states(5)
    for scheme, made in SCHEMES.items():
        whole = quantised(head, made)(x)
        with monkeypatch.context() as patched:
            patched.setattr("eagle_train.models.head._ROWS", 32)
            parts, asked = quantised(head, made), made.rounded
            assert torch.equal(parts(x), whole), scheme
            rows = []
            patched.setattr(made, "rounded", staticmethod(lambda w, m: (rows.append(len(w)), asked(w, m))[1]))  # noqa: B023
            quantised(head, made)
        assert rows == [32, 32, 32]


def test_the_head_of_some_tokens_may_be_in_few_bits():
    head, tokens, x = head_of(96, has_bias=True, softcap=5.0), torch.tensor([3, 90, 17, 4, 5]), states(4)
    small = quantised(head.of(tokens), SCHEMES["int4"])
    assert isinstance(small, QuantisedLMHead)
    torch.testing.assert_close(small(x), quantised(head, SCHEMES["int4"])(x)[:, tokens])
