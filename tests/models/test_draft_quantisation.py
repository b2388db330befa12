"""Drafts in few bits: what is quantised and what is not, what an engine says with them, and users' mistakes."""

import pytest
import torch
from torch import nn

from eagle_train import generate
from eagle_train.artifacts.format import load_draft, read_artifact, save_draft
from eagle_train.errors import UserError
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.drafters.eagle import Eagle
from eagle_train.models.draft_quantisation import Quant, linear_modules, quant_of, quantise_draft
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.linear import Fp8Linear, Int4Linear, QuantisedLinear
from eagle_train.ops.weight_codes import dequantise, quantise_fp8, quantise_int4
from tests.support.command_line import call
from tests.support.eval_inputs import make_home
from tests.support.inside import drafter_of
from tests.support.tiny import continued, random_tokens, tiny_draft, tiny_target, trained_draft

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
ALL = "quant.scope=all_linear"
MADE = {"int4": Int4Linear, "fp8": Fp8Linear}


@pytest.fixture(scope="module")
def target():
    return tiny_target(**WIDE)


def replaced(draft) -> set[str]:
    return {name for name, module in draft.named_modules() if isinstance(module, QuantisedLinear)}


DENSE = {f"layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "up", "down")}
ATTENTION = {f"layers.{i}.self_attn.{name}_proj" for i in range(2) for name in "qkvo"}
EXPERTS = {
    f"layers.{i}.mlp.{which}.{name}_proj"
    for i in range(2)
    for which in ("shared_expert", "experts.0", "experts.1")
    for name in ("gate", "up", "down")
}


@pytest.mark.parametrize("scheme", MADE)
@pytest.mark.parametrize(
    ("ffn", "scope", "wanted"),
    [
        ("dense", "ffn", DENSE),
        ("dense", "all_linear", DENSE | ATTENTION | {"fc"}),
        ("moe", "ffn", EXPERTS),
        ("moe", "all_linear", EXPERTS | ATTENTION | {"fc"}),
    ],
)
def test_the_scope_and_nothing_else(target, scheme, ffn, scope, wanted):
    draft = tiny_draft(target, ffn=ffn, num_experts=2)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    small = quantise_draft(draft, Quant(scheme, scope))
    assert replaced(small) == wanted
    assert {type(small.get_submodule(name)) for name in wanted} == {MADE[scheme]}
    assert replaced(draft) == set()
    torch.testing.assert_close(draft.state_dict(), before, rtol=0, atol=0)
    kept = {name: tensor for name, tensor in before.items() if name.removesuffix(".weight") not in wanted}
    torch.testing.assert_close({name: small.state_dict()[name] for name in kept}, kept, rtol=0, atol=0)
    assert (small.num_parameters, small.config) == (draft.num_parameters, draft.config)


@pytest.mark.parametrize("ffn", ["dense", "moe"])
@pytest.mark.parametrize("scope", ["ffn", "all_linear"])
@pytest.mark.parametrize("scheme", MADE)
def test_it_computes_with_the_rounded_weights(target, scheme, scope, ffn):
    """In INT4 activations stay as they are, so it is a draft with rounded weights; in FP8 it is near to one."""
    kind = {"ffn": ffn, "num_experts": 2, "fc_bias": True}
    small, rounded = quantise_draft(tiny_draft(target, **kind), Quant(scheme, scope)), tiny_draft(target, **kind)
    for module in linear_modules(rounded, scope).values():
        codes, scales = (quantise_int4 if scheme == "int4" else quantise_fp8)(module.weight)
        module.weight.copy_(dequantise(codes, scales))
    torch.manual_seed(0)
    arguments = torch.randn(1, 9, 128), torch.randn(1, 9, 128), torch.arange(9)[None], packed_attention([[9]])
    found, wanted = small(*arguments), rounded(*arguments)
    if scheme == "int4":
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    elif ffn == "dense":
        assert 1e-4 < (found - wanted).norm() / wanted.norm() < 0.1
    assert found.isfinite().all()


def test_none_is_the_draft_itself(target):
    draft = tiny_draft(target)
    assert quantise_draft(draft, Quant()) is draft


QUESTIONS = random_tokens(5, 1, 9)


@pytest.fixture(scope="module")
def wanted(target) -> list[list[int]]:
    return [continued(target, prompt, 12) for prompt in QUESTIONS]


@pytest.mark.parametrize("ffn", ["dense", "moe"])
@pytest.mark.parametrize("scope", ["ffn", "all_linear"])
@pytest.mark.parametrize("scheme", MADE)
def test_an_engines_output_is_the_targets_own(target, wanted, scheme, scope, ffn):
    small = quantise_draft(tiny_draft(target, ffn=ffn, num_experts=2), Quant(scheme, scope))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for tree in ("chain3", "d3_bf2"):
        engine = Engine(target, small, tree)
        assert [output.token_ids for output in engine.generate(QUESTIONS, params)] == wanted
        used = [
            module.has_kernel for module in drafter_of(engine).draft.modules() if isinstance(module, QuantisedLinear)
        ]
        assert used
        assert all(used)
    assert not any(module.has_kernel for module in small.modules() if isinstance(module, QuantisedLinear))


def test_it_guesses_almost_as_well():
    target = tiny_target(std=0.05, **WIDE)
    draft = trained_draft(target, steps=60)
    params, prompts = SamplingParams(max_tokens=40, ignore_eos=True), random_tokens(*range(3, 19))

    def tpc(draft) -> float:
        stats = [output.stats for output in Engine(target, draft).generate(prompts, params)]
        return sum(each.tokens for each in stats) / sum(each.calls for each in stats)

    whole = tpc(draft)
    assert whole > 1.3
    for scheme in MADE:
        assert tpc(quantise_draft(draft, Quant(scheme))) > 0.93 * whole


def test_an_eagle_in_another_dtype_has_the_codes_of_the_artifact(target):
    """Weights are rounded once: neither scales nor codes are rounded again to the target's dtype."""
    draft = tiny_draft(target)
    half = Eagle(quantise_draft(draft, Quant("fp8")), tiny_target(dtype=torch.bfloat16, **WIDE)).draft
    module, (codes, scales) = half.layers[0].mlp.down_proj, quantise_fp8(draft.layers[0].mlp.down_proj.weight)
    assert torch.equal(module.codes.float(), codes.float())
    assert torch.equal(module.scales.view(torch.float32), scales)
    assert half.fc.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda target: Quant("int3"), "quant.scheme=int3: must be one of none, int4, fp8"),
        (lambda target: Quant("int4", "attention"), "quant.scope=attention: must be ffn or all_linear"),
        (
            lambda target: quantise_draft(tiny_draft(target, intermediate_size=192), Quant("int4")),
            "quant.scheme=int4: layers.0.mlp.down_proj of the draft has 128 outputs and 192 inputs; must be multiples "
            "of 16 and 128; quant=fp8 would do",
        ),
        (
            lambda target: quantise_draft(tiny_draft(target, intermediate_size=24), Quant("fp8")),
            "quant.scheme=fp8: layers.0.mlp.gate_proj of the draft has 24 outputs and 128 inputs; must be multiples "
            "of 16 and 16; quant=none would do",
        ),
    ],
)
def test_mistakes_are_one_line(target, make, message):
    with pytest.raises(UserError) as raised:
        make(target)
    assert str(raised.value) == message


@pytest.mark.parametrize("fc_bias", [False, True])
@pytest.mark.parametrize("scope", ["ffn", "all_linear"])
@pytest.mark.parametrize("scheme", MADE)
def test_a_quantised_draft_is_saved_as_it_is(target, tmp_path, scheme, scope, fc_bias):
    small = quantise_draft(tiny_draft(target, fc_bias=fc_bias), Quant(scheme, scope))
    loaded = load_draft(save_draft(small, tmp_path / "draft", target.identity, dtype=torch.float32), target.identity)
    assert replaced(loaded) == replaced(small)
    assert quant_of(loaded) == read_artifact(tmp_path / "draft").quant == Quant(scheme, scope)
    torch.testing.assert_close(loaded.state_dict(), small.state_dict(), rtol=0, atol=0)
    with pytest.raises(UserError, match=f"quant.scheme=int4: the draft is quantised already, {scheme}"):
        quantise_draft(loaded, Quant("int4"))


def test_generate_quantises(tmp_path, capsys, monkeypatch):
    home, seen = make_home(tmp_path, width=128), []
    given = [f"target.path={home}/target", "prompt=Name a colour.", "max_tokens=12", "color=never"]
    monkeypatch.setattr(nn.Module, "eval", lambda self: seen.append(replaced(self)) or self)
    said = []
    # Libraries may say something when they are first imported.
    for more in ([], [], [f"draft={home}/draft", "quant=int4"], [f"draft={home}/draft", "quant=fp8", ALL]):
        capsys.readouterr()
        assert call(generate.main, *given, *more) == 0
        said.append(capsys.readouterr().out.replace("[", "").replace("]", ""))
    assert said[1] == said[2] == said[3]
    assert [len(names) for names in seen if names] == [9, 9 + 12 + 1]
    assert call(generate.main, *given, "quant=int4") == 2
    assert "error: quant.scheme=int4: no draft to quantise; give draft=DIR" in capsys.readouterr().err
    assert call(generate.main, *given, "quant=int4", "quant.scope=head") == 2
    assert "error: quant.scope=head: must be ffn or all_linear" in capsys.readouterr().err
