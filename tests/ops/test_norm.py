"""The norm of few operations against `F.rms_norm`, its plain twin."""

import pytest
import torch
import torch.nn.functional as F

from eagle_train.ops.norm import rms_norm

EPS = 1e-2  # large enough to be seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(24,), (1, 1, 24), (2, 5, 24), (0, 24)])
@torch.no_grad()
def test_equals_the_plain_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.rand(24).to(dtype)
    before, ours = x.clone(), rms_norm(x, weight, EPS)
    plain = F.rms_norm(x.float(), (24,), weight.float(), EPS).to(dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(x, before)
    torch.testing.assert_close(rms_norm(torch.zeros(24), torch.ones(24), EPS), torch.zeros(24))


def test_gradients_equal_the_plain_twin() -> None:
    x, weight = torch.randn(3, 24, requires_grad=True), torch.rand(24, requires_grad=True)
    ours = torch.autograd.grad(rms_norm(x, weight, EPS).square().sum(), (x, weight))
    plain = torch.autograd.grad(F.rms_norm(x, (24,), weight, EPS).square().sum(), (x, weight))
    torch.testing.assert_close(ours, plain)
