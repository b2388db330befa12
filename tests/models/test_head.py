"""An LM head's most likely tokens; and in few bits, the logits of the weight that its codes stand for, whatever a
family makes of them."""

import pytest
import torch
import torch.nn.functional as F

from eagle_train.models.draft_quantisation import SCHEMES
from eagle_train.models.head import LMHead, QuantisedLMHead, quantised
from eagle_train.ops import head_argmax
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


FAMILIES = [{}, {"scale": 0.25}, {"softcap": 30.0}, {"scale": -4.0, "softcap": 50.0}]  # caps that make nothing equal


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
def test_the_kernel_finds_the_most_likely_token(monkeypatch, is_part, has_bias, family):
    """With the head of some tokens too, in its own numbers; several tokens come from logits."""
    pytest.importorskip("triton", reason="it comes with torch for CUDA, and with xgrammar")
    calls, kernel = [], head_argmax.head_argmax
    whole = head_of(96, has_bias, **family)
    head = LMHead(whole.weight.half(), None if whole.bias is None else whole.bias.half(), whole.scale, whole.softcap)
    head, x = head.of(torch.arange(90, 0, -3)) if is_part else head, states(2, 3)
    logits = head(x)
    wanted, several = head.greatest(x), head.most_likely(x, 3)
    monkeypatch.setattr(head_argmax, "_runs_on", lambda device: True)
    monkeypatch.setattr(head_argmax, "pays", lambda hidden, weight, _: head_argmax.supports(hidden, weight))
    monkeypatch.setattr(head_argmax, "head_argmax", lambda *given: (calls.append(given), kernel(*given))[1])
    found = head.greatest(x)
    assert torch.equal(wanted[0], logits.amax(-1, keepdim=True))
    torch.testing.assert_close(found[0], wanted[0].float(), rtol=2e-3, atol=0)
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(head.most_likely(x, 1), logits.argmax(-1, keepdim=True))
    assert len(calls) == 2
    assert torch.equal(head.most_likely(x, 3), several)
    assert len(calls) == 2


def test_the_first_of_equal_logits_is_the_most_likely_and_what_is_no_number_is_before_all():
    head = LMHead(torch.eye(3).repeat(2, 1))
    value, token = head.greatest(torch.tensor([[0.0, 2.0, 1.0], [1.0, 1.0, 0.0], [0.0, torch.nan, 5.0]]))
    assert token.flatten().tolist() == [1, 0, 0]
    assert value.flatten()[:2].tolist() == [2.0, 1.0]
    assert value[2].isnan().item()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_kernel_reads_the_weight_of_a_head_in_few_bits(monkeypatch, scheme):
    """It has none; its most likely token is that of its codes."""
    monkeypatch.setattr(head_argmax, "_runs_on", lambda device: True)
    monkeypatch.setattr(head_argmax, "pays", lambda hidden, weight, _: head_argmax.supports(hidden, weight))
    head, x = quantised(LMHead(head_of(96).weight.bfloat16()), SCHEMES[scheme]), states(4)
    assert torch.equal(head.most_likely(x, 1), head(x).argmax(-1, keepdim=True))
