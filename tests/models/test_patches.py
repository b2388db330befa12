"""Modules that take the place of a model's own: they compute the same, and go again when they are undone."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, CohereConfig

from eagle_train.errors import UserError
from eagle_train.models.family import skeleton
from eagle_train.models.forward import hidden_states
from eagle_train.models.fused import fuse_products
from eagle_train.models.patches import (
    Undo,
    join_products,
    optimize_for_decoding,
    round_to_fp8,
    rounded_to_fp8,
    shared_inputs,
    use_fast_modules,
)
from eagle_train.ops import joint_linear
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.joint_linear import JointLinear
from eagle_train.ops.linear import Fp8Linear, FrozenFp8Linear, Int4Linear, Linear, fp16_copy_of
from eagle_train.ops.norm import FastNorm
from evals.bench.baselines import stock_model
from tests.support.packed_rows import packed_and_alone
from tests.support.tiny import FAMILIES, LAYERED, SIZES, shared_target, tiny_draft, tiny_model, tiny_target

EPS = 1e-2  # large enough to be seen


def classes_of(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def logits_of(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(9)[None], use_cache=False).logits


def test_a_norm_of_each_head_is_none_of_ours() -> None:
    """Command R+'s: its weight has two axes."""
    config = CohereConfig(**SIZES, use_qk_norm=True)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    logits = logits_of(model)
    use_fast_modules(model)
    torch.testing.assert_close(logits_of(model), logits)


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
    quick = classes_of(model)
    assert all(issubclass(new, old) for new, old in zip(quick, fast, strict=True))
    torch.testing.assert_close(logits_of(model), logits)
    optimize_for_decoding(model, torch.float32)  # what is done is not done again
    assert classes_of(model) == quick
    also()
    assert classes_of(model) == fast
    undo()
    assert classes_of(model) == own
    assert not any(getattr(module, "routed", False) for module in model.modules())
    assert torch.equal(logits_of(model), logits)
    assert all(before[name] is weight for name, weight in model.named_parameters())
    undo()  # nothing is left to do
    assert classes_of(model) == own


@pytest.mark.parametrize("family", sorted({*FAMILIES, *LAYERED}))
def test_what_reads_the_same_is_one_product(family: str) -> None:
    """In every family: states are those of products apart, weights are the same numbers, and nothing is kept twice."""
    target = tiny_target(family)
    weights = {name: weight.clone() for name, weight in target.model.named_parameters()}
    size = sum(weight.untyped_storage().nbytes() for weight in target.model.parameters())
    tokens, positions = torch.arange(9)[None], torch.arange(9)[None]
    before = target.hidden_states(tokens, positions, packed_attention([[9]]))
    target.join_products()
    joined = [module for module in target.model.modules() if isinstance(module, JointLinear)]
    assert len(joined) >= 2 * target.config.num_hidden_layers, "at least two products of each layer read the same"
    after = target.hidden_states(tokens, positions, packed_attention([[9]]))
    torch.testing.assert_close(after, before)
    assert all(torch.equal(weight, weights[name]) for name, weight in target.model.named_parameters())
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in target.model.parameters()}
    assert sum(storage.nbytes() for storage in storages.values()) <= size
    stock = stock_model(target)
    assert not any(isinstance(module, JointLinear) for module in stock.modules())
    assert all(isinstance(module, JointLinear) for module in joined), "a copy's are its own again, not the target's"


def test_a_copy_of_joined_modules_has_weights_of_its_own() -> None:
    target, tokens = tiny_target("llama"), torch.arange(9)[None]
    target.join_products()
    other = copy.deepcopy(target.model)
    before = target.hidden_states(tokens, tokens, packed_attention([[9]]))
    torch.testing.assert_close(hidden_states(other, tokens, tokens, packed_attention([[9]]), target.reaches), before)
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(3)
    assert torch.equal(target.hidden_states(tokens, tokens, packed_attention([[9]])), before)
    changed = hidden_states(other, tokens, tokens, packed_attention([[9]]), target.reaches)
    assert not torch.allclose(changed, before, rtol=1e-2)


def test_threads_that_run_a_joined_model_at_once_get_their_own_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another thread's call comes right behind the product of this one's."""
    a, b = (Linear(4, size, bias=False).requires_grad_(False) for size in (3, 2))
    join_products([[a, b]], Undo())
    x, y, plain = torch.randn(1, 4), torch.randn(1, 4), joint_linear.linear

    def linear(given: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        out = plain(given, *weights)
        if given is x:
            a(y)
        return out

    monkeypatch.setattr(joint_linear, "linear", linear)
    for module, given in ((a, x), (b, y), (b, x)):
        torch.testing.assert_close(module(given), F.linear(given, module.weight))


def test_only_what_is_given_the_very_same_tensor_is_joined() -> None:
    class Layer(nn.Module):
        def __init__(self, change: bool, again: bool):
            super().__init__()
            self.a, self.b, self.c = (Linear(4, size, bias=False) for size in (3, 2, 4))
            self.requires_grad_(False)
            self.change, self.again = change, again

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            a = self.a(x)
            if self.change:
                x.mul_(2)
            b, c = self.b(x), self.c(x.clone())
            return [a, b, c, *([self.b(x + 1)] if self.again else [])]

    def groups(change: bool = False, again: bool = False) -> list[list[nn.Module]]:
        return shared_inputs(layer := Layer(change, again), lambda: layer(torch.randn(2, 4)))

    assert [len(each) for each in groups()] == [2]
    assert groups(change=True) == []
    outside = Layer(False, False)
    with torch.inference_mode():
        assert [len(each) for each in shared_inputs(outside, lambda: outside(torch.randn(2, 4)))] == [2]
        assert groups() == [], "weights that were made here cannot become views"
    assert groups(again=True) == []
    layer = Layer(False, False)
    join_products([[layer.a, layer.b]], Undo())
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    with torch.no_grad():
        layer.a(x)
        torch.testing.assert_close(layer.b(y), F.linear(y, layer.b.weight))  # who is not given the same computes anew
        torch.testing.assert_close(layer.a(y), F.linear(y, layer.a.weight))
        layer.a.register_forward_hook(lambda *_: None)
    assert shared_inputs(layer, lambda: layer(x)) == []


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


IN_FP8 = [*FAMILIES, *LAYERED, "phi3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", IN_FP8)
def test_a_familys_layers_multiply_in_fp8_and_the_rest_stays(family: str, dtype: torch.dtype) -> None:
    target = tiny_target(family, dtype=dtype)
    linears, kept = rounded_to_fp8(target.model), dict(target.model.named_parameters())
    assert all(min(module.weight.shape) >= 16 for module in linears.values())
    numbers, rows = (sum(of(m.weight) for m in linears.values()) for of in (torch.numel, len))
    gone = [weakref.ref(module.weight) for module in linears.values()]
    here = {id(module.weight) for module in linears.values()}
    kept = {name: weight for name, weight in kept.items() if id(weight) not in here}
    size = sum(weight.nbytes for weight in target.model.parameters())
    names, fingerprint = list(linears), target.identity.fingerprint
    del linears
    count, error = target.round_to_fp8()
    assert count == len(names) >= 12
    assert 0.01 < error < 0.3  # 3 to 6 layers of random weights
    assert not any(weight() is not None for weight in gone), "the weights in more bits are freed"
    made = [module for module in target.model.modules() if isinstance(module, FrozenFp8Linear)]
    codes = sum(module.codes.nbytes + module.scales.nbytes for module in made)
    assert codes == numbers + 4 * rows
    own = sum(weight.nbytes for weight in target.model.parameters()) + codes
    biases = sum(module.bias.nbytes for module in made if module.bias is not None)  # buffers from now on
    assert own + biases == size - (dtype.itemsize - 1) * numbers + 4 * rows
    stays = dict(target.model.named_parameters())
    assert all(stays[name] is kept[name] for name in stays)
    assert target.lm_head.weight.dtype == target.embedding.dtype == dtype
    assert target.identity.fingerprint == fingerprint


@pytest.mark.parametrize("family", IN_FP8)
def test_documents_of_a_packed_row_do_not_see_each_other_in_fp8(family: str) -> None:
    target = tiny_target(family)
    target.round_to_fp8()
    packed, alone = packed_and_alone(target)
    torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", IN_FP8)
def test_a_plan_knows_which_modules_are_rounded(family: str) -> None:
    target = tiny_target(family)
    planned = rounded_to_fp8(skeleton(target.model.config, False, "target"))
    found = rounded_to_fp8(target.model)
    shapes = [{name: tuple(module.weight.shape) for name, module in of.items()} for of in (planned, found)]
    assert shapes[0] == shapes[1] != {}
    assert not any("router" in name or "lm_head" in name or name.endswith(".gate") for name in found)


def test_a_module_of_an_odd_size_stays_as_it_is() -> None:
    target = tiny_target(intermediate_size=40)
    odd = [module for name, module in target.model.named_modules() if ".mlp." in name and isinstance(module, Linear)]
    count, error = target.round_to_fp8()
    assert (count, len(odd)) == (4 * 3, 3 * 3)
    assert all(type(module) is Linear and module.weight.dtype == torch.float32 for module in odd)
    assert error < 0.3


def test_routers_and_quantised_modules_are_not_rounded() -> None:
    class Quantised(nn.Linear):
        pass

    model = tiny_model()
    layer = model.model.layers[1]
    layer.mlp.gate = nn.Linear(32, 16)
    layer.self_attn.q_proj = Quantised(32, 32)
    found = rounded_to_fp8(model)
    assert "layers.1.self_attn.k_proj" in found
    assert not {"layers.1.mlp.gate", "layers.1.self_attn.q_proj"} & set(found)


@torch.no_grad()
def test_what_is_rounded_is_not_undone_and_all_else_is() -> None:
    model = tiny_model().requires_grad_(False)
    undo = use_fast_modules(model)
    count = round_to_fp8(model, undo)
    undo()
    assert [type(module) for module in model.modules()].count(FrozenFp8Linear) == count == 21
    assert not any(isinstance(module, FastNorm) for module in model.modules())
    assert logits_of(model).isfinite().all()


def test_a_family_that_reads_its_weights_itself_is_refused_in_fp8(monkeypatch) -> None:
    target = tiny_target()
    for layer in target.model.model.layers:
        monkeypatch.setattr(layer.mlp, "forward", lambda x, mlp=layer.mlp: F.linear(x, mlp.up_proj.weight)[..., :32])
    with pytest.raises(UserError, match=r"^target tiny-llama: llama cannot be rounded to FP8: AttributeError: "):
        target.round_to_fp8()
