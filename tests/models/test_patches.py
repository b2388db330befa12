"""Modules that take the place of a model's own: they compute the same, and go again when they are undone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from eagle_train.models.fused import fuse_products
from eagle_train.models.patches import optimize_for_decoding, use_fast_modules
from eagle_train.ops.linear import Fp8Linear, Int4Linear, Linear, fp16_copy_of
from eagle_train.ops.norm import FastNorm
from tests.support.tiny import shared_target, tiny_draft, tiny_model

EPS = 1e-2  # large enough to be seen


def classes_of(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def logits_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(9)[None], use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "llama4"])
@torch.no_grad()
def test_what_is_undone_is_as_it_was(family: str) -> None:
    model = tiny_model(family).eval().requires_grad_(False)
    own, before, logits = classes_of(model), dict(model.named_parameters()), logits_of(model)
    undo = use_fast_modules(model)
    fast = classes_of(model)
    assert Linear in fast
    assert any(getattr(module, "routed", False) for module in model.modules()) == (family == "llama4")
    torch.testing.assert_close(logits_of(model), logits)
    also = optimize_for_decoding(model, torch.float32)
    assert classes_of(model) == fast
    also()
    undo()
    assert classes_of(model) == own
    assert not any(getattr(module, "routed", False) for module in model.modules())
    assert torch.equal(logits_of(model), logits)
    assert all(before[name] is weight for name, weight in model.named_parameters())
    undo()  # nothing is left to do
    assert classes_of(model) == own


@torch.no_grad()
def test_a_copys_undo_leaves_the_model_alone() -> None:
    model = tiny_model("llama").requires_grad_(False)
    own, undo = classes_of(model), use_fast_modules(model)
    fast = classes_of(model)
    other, undo_other = copy.deepcopy((model, undo))
    undo_other()
    assert classes_of(other) == own
    assert classes_of(model) == fast


@pytest.mark.skipif(torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="no product with fp16 weights")
def test_copies_in_fp16_go_and_another_ones_stay() -> None:
    model = nn.Sequential(Linear(8, 8), Linear(8, 8)).requires_grad_(False)
    for layer in model:
        layer.weight.copy_(layer.weight.half().float())
    head = torch.randn(16, 8).half().float()
    first = optimize_for_decoding(model[:1], torch.float32)
    second = optimize_for_decoding(model, torch.float32, [head])
    assert all(fp16_copy_of(weight) is not None for weight in (model[0].weight, model[1].weight, head))
    second()
    assert [fp16_copy_of(weight) is not None for weight in (model[0].weight, model[1].weight, head)] == [1, 0, 0]
    first()
    assert fp16_copy_of(model[0].weight) is None


def test_modules_are_called_without_their_hooks() -> None:
    draft, called = tiny_draft(shared_target()), []
    ours = fuse_products(draft)
    own = classes_of(ours)
    undo = optimize_for_decoding(ours, torch.float32, drop_hooks=True)
    for module in ours.modules():
        module.register_forward_pre_hook(lambda module, given: called.append(module))
    x = torch.randn(1, 3, draft.config.hidden_size)

    def run() -> int:
        called.clear()
        ours(x, x, torch.arange(3)[None], lambda layer, q, k, v, rule: q)
        return len(set(called))

    assert run() == 1  # the whole draft's, which is called from outside
    undo()
    assert classes_of(ours) == own
    assert run() > 10


@pytest.mark.parametrize("made", [Int4Linear, Fp8Linear])
def test_quantised_modules_take_their_kernel_once(made: type) -> None:
    model, x = nn.Sequential(made.of(torch.randn(48, 256))), torch.randn(3, 256)
    optimize_for_decoding(model, torch.float32)
    before = model(x)
    optimize_for_decoding(model, torch.float32)  # there already
    assert model[0].has_kernel
    assert torch.equal(model(x), before)


def test_a_model_keeps_its_parameters_and_special_linears() -> None:
    class Quantised(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Quantised(8, 8), nn.Linear(8, 4, bias=False)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(4, 8)
    plain = model(x)
    use_fast_modules(model)
    assert [type(layer) for layer in (model[0], *model[1])] == [Linear, Quantised, Linear]
    torch.testing.assert_close(model.state_dict(), before)
    torch.testing.assert_close(model(x), plain)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@torch.no_grad()
def test_a_familys_norms_are_ours_where_they_compute_the_same(family: str) -> None:
    model = tiny_model(family)
    own = copy.deepcopy(model)
    use_fast_modules(model)
    use_fast_modules(model)  # nothing is left to do
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
    use_fast_modules(module)
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
    use_fast_modules(module)
    assert type(module) is Gated


def test_a_target_has_them() -> None:
    assert any(isinstance(module, FastNorm) for module in shared_target().model.modules())
