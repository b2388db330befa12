"""The fast product of few rows against `F.linear`, its plain twin."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.ops import linear as module
from eagle_train.ops.linear import Linear, linear, use_fast_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 6, 7])
def test_equals_the_plain_twin(rows: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(rows, 24), torch.randn(40, 24), torch.randn(40)
    arguments = (x.to(dtype), weight.to(dtype), bias.to(dtype) if has_bias else None)
    ours, plain = linear(*arguments), F.linear(*arguments)
    assert ours.dtype == dtype
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("shape", [(1, 4, 24), (4, 1, 24), (2, 3, 24), (24,)])
def test_keeps_the_leading_dimensions(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(40, 24)
    torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
    strided = torch.randn(*shape[:-1], 48)[..., ::2]
    torch.testing.assert_close(linear(strided, weight), F.linear(strided, weight))


def test_gradients_equal_the_plain_twin() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(4, 24, requires_grad=True), (torch.randn(40, 24) / 24**0.5).requires_grad_()  # a layer's
    ours = torch.autograd.grad(linear(x, weight).square().sum(), (x, weight))
    plain = torch.autograd.grad(F.linear(x, weight).square().sum(), (x, weight))
    torch.testing.assert_close(ours, plain)


def test_only_few_rows_of_small_weights_leave_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(module.F, "linear", lambda x, weight, bias: calls.append(x.shape))
    for rows in (1, 4, 7):
        linear(torch.randn(rows, 8), torch.randn(16, 8))
    monkeypatch.setattr(module, "SMALL_WEIGHT", 100)
    linear(torch.randn(4, 8), torch.randn(16, 8))
    assert calls == [(1, 8), (7, 8), (4, 8)]


def test_a_model_keeps_its_parameters_and_special_linears() -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Quantised(8, 8), nn.Linear(8, 4, bias=False)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(4, 8)
    plain = model(x)
    use_fast_linear(model)
    assert [type(layer) for layer in (model[0], *model[1])] == [Linear, Quantised, Linear]
    torch.testing.assert_close(model.state_dict(), before)
    torch.testing.assert_close(model(x), plain)
