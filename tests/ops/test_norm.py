"""The norm of few operations against `F.rms_norm`, its plain twin, and against the families' own."""

import copy

import pytest
import torch
import torch.nn.functional as F

from eagle_train.ops.norm import FastNorm, rms_norm, use_fast_norms
from tests.support.tiny import shared_target, tiny_model

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


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@torch.no_grad()
def test_a_familys_norms_are_ours_where_they_compute_the_same(family: str) -> None:
    model = tiny_model(family)
    own = copy.deepcopy(model)
    use_fast_norms(model)
    use_fast_norms(model)  # nothing is left to do
    pairs = [pair for pair in zip(model.modules(), own.modules(), strict=True) if "Norm" in type(pair[1]).__name__]
    assert {isinstance(ours, FastNorm) for ours, _ in pairs} == {family != "gemma2"}  # whose weights are told from 1
    for ours, plain in pairs:
        x = torch.randn(3, len(plain.weight))
        torch.testing.assert_close(ours(x), plain(x))
        assert isinstance(ours, type(plain))
    torch.testing.assert_close(model.state_dict(), own.state_dict())


def test_what_only_looks_like_a_norm_stays_as_it_is() -> None:
    class Centred(torch.nn.Module):
        variance_epsilon = EPS

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(24))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (24,), self.weight, eps=EPS)

    module = Centred()
    use_fast_norms(module)
    assert type(module) is Centred


@pytest.mark.parametrize("defaults", [None, (None,)])
def test_a_norm_with_a_gate_stays_as_it_is(defaults: tuple | None) -> None:
    class Gated(torch.nn.Module):
        variance_epsilon = EPS

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.rand(24))

        def forward(self, x: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
            x = F.rms_norm(x, (24,), self.weight, EPS)
            return x if gate is None else x * F.silu(gate)

    Gated.forward.__defaults__ = defaults  # without a gate it is a plain norm, or must have one
    module = Gated()
    use_fast_norms(module)
    assert type(module) is Gated


def test_a_target_has_them() -> None:
    assert any(isinstance(module, FastNorm) for module in shared_target().model.modules())
