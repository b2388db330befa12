"""Calibrated drafts: the moments against a draft written out, document by document, and what they are good for."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from eagle_train.artifacts.calibrate import Moments, calibrated
from eagle_train.corpus.source import DataConfig
from eagle_train.corpus.stream import Batch, Packer, collate
from eagle_train.corpus.tokens import Document
from eagle_train.drafts import Draft, shift_hidden
from eagle_train.drafts.kind import TargetStates
from eagle_train.errors import UserError
from eagle_train.models.draft_quantisation import Quant, linear_modules, quantise_draft
from eagle_train.models.layers import rotate
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.linear import QuantisedLinear
from tests.support.tiny import random_tokens, tiny_draft, tiny_mtp, tiny_peagle, tiny_target, trained_draft

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@cache
def target() -> Target:
    return tiny_target(**WIDE)


def packed(*documents: list[int], row: int = 32) -> Batch:
    """In one row, each with a prompt of two tokens; what is left of the row is padding."""
    packer = Packer(DataConfig(path="none", row_tokens=row))
    for document in documents:
        assert packer.add([Document(torch.tensor(document), torch.arange(len(document)) >= 2)]) == []
    return collate(packer.flush())


def written_out(draft: Draft, document: list[int]) -> dict[str, torch.Tensor]:
    """X^T X of every linear module's inputs in the supervised slots of a document, from its second to its last but one.

    The target's hidden states come from transformers' own attention.
    """
    inputs, tokens = {}, torch.tensor(document)
    target().model.set_attn_implementation("eager")
    hidden = target().model(tokens[None], output_hidden_states=True).hidden_states[-1][0]
    target().model.set_attn_implementation("eagle_train")
    embeddings, rotary = target().embed(tokens), draft.rotary(torch.arange(len(tokens))[None])
    future, places = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1), torch.arange(len(tokens))
    counted = (places > 0) & (places < len(tokens) - 1)

    def product(name: str, x: torch.Tensor, sent: torch.Tensor = counted) -> torch.Tensor:
        inputs[name] = x[counted & sent]
        return x @ draft.get_submodule(name).weight.t()

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (-1, draft.config.head_dim)).transpose(0, 1)[None]

    def feed_forward(name: str, x: torch.Tensor, *sent: torch.Tensor) -> torch.Tensor:
        gate, up = (product(f"{name}.{part}_proj", x, *sent) for part in ("gate", "up"))
        return product(f"{name}.down_proj", F.silu(gate) * up, *sent)

    previous = torch.cat((hidden[:1], hidden[:-1]))
    x = product("fc", torch.cat((embeddings, previous), dim=1))
    for number, layer in enumerate(draft.layers):
        name, normed = f"layers.{number}", layer.input_layernorm(x)
        q, k, v = (heads(product(f"{name}.self_attn.{part}_proj", normed)) for part in "qkv")
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (rotate(k, rotary), v))
        scores = rotate(q, rotary) @ k.transpose(2, 3) / draft.config.head_dim**0.5
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        x = x + product(f"{name}.self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1))
        normed, name = layer.post_attention_layernorm(x), f"{name}.mlp"
        if draft.config.ffn == "dense":
            x = x + feed_forward(name, normed)
            continue
        x = x + feed_forward(f"{name}.shared_expert", normed)
        gate, best = (normed @ layer.mlp.router.weight.t()).max(-1)
        for expert in range(draft.config.num_experts):
            sent = best == expert
            x = x + sent[:, None] * feed_forward(f"{name}.experts.{expert}", normed * gate.sigmoid()[:, None], sent)
    return {name: x.t() @ x for name, x in inputs.items()}


@pytest.mark.parametrize("ffn", ["dense", "moe"])
def test_moments_are_those_of_a_draft_written_out(ffn):
    draft, documents = tiny_draft(target(), ffn=ffn, num_experts=3), random_tokens(9, 14, 12)
    each = [written_out(draft, document) for document in documents]
    moments = Moments(draft, Quant("fp8", "all_linear"))
    for batch in (packed(*documents[:2]), packed(documents[2])):
        moments.add_batch(batch, target())
    assert moments.slots == 7 + 12 + 10
    wanted = {name: sum(one[name] for one in each) for name in each[0]}
    scale = {name: moment.abs().max() for name, moment in wanted.items()}
    assert all(scale[name] > 0 for name in scale if "experts" not in name)
    for name, found in moments.sums.items():
        torch.testing.assert_close(found, wanted.pop(name), rtol=0, atol=2e-5 * scale[name].item(), msg=name)
    assert wanted == {}


def batches(count: int, seed: int = 0) -> list[Batch]:
    """Of few different tokens, so that what a layer is given is correlated."""
    return [packed(*random_tokens(40, 60, 25, vocabulary=24, seed=seed + i), row=128) for i in range(count)]


@pytest.fixture(scope="module")
def pair() -> tuple[Target, Draft]:
    target = tiny_target(std=0.05, **WIDE)
    return target, trained_draft(target, steps=60)


@pytest.mark.parametrize("scheme", ["int4", "fp8"])
@pytest.mark.parametrize("scope", ["ffn", "all_linear"])
def test_it_is_nearer_to_the_draft_than_one_rounded_to_nearest(pair, scheme, scope):
    """On text that it was not calibrated on."""
    (target, draft), quant, batch = pair, Quant(scheme, scope), batches(1, seed=99)[0]
    hidden = target.hidden_states(batch.tokens, batch.positions, packed_attention(batch.lengths))
    previous = shift_hidden(hidden, batch.positions)

    def states(draft: Draft) -> torch.Tensor:
        given = target.embed(batch.tokens), previous, batch.positions, packed_attention(batch.lengths)
        return draft(*given)[batch.supervised]

    small = calibrated(draft, target, batches(16), quant)
    lost = [(states(each) - states(draft)).square().mean() for each in (quantise_draft(draft, quant), small)]
    assert 0 < lost[1] < 0.8 * lost[0]


def test_it_takes_the_tokens_it_was_told_and_leaves_the_draft_alone():
    draft, taken = tiny_draft(target(), ffn="moe", num_experts=2).bfloat16(), []
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    stream = (taken.append(batch) or batch for batch in batches(5))
    per_batch = int(batches(1)[0].supervised.sum())
    small = calibrated(draft, target(), stream, Quant("fp8"), tokens=per_batch + 1)
    assert len(taken) == 2
    torch.testing.assert_close(draft.state_dict(), before, rtol=0, atol=0)
    for each in (draft, small):
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in each.modules())
        assert each.fc.weight.dtype == torch.bfloat16
    replaced = {name for name, module in small.named_modules() if isinstance(module, QuantisedLinear)}
    assert replaced == set(linear_modules(draft, "ffn"))
    assert calibrated(draft, target(), stream, Quant()) is draft


def test_a_draft_whose_mask_slots_go_through_fc_is_calibrated_too():
    """P-EAGLE's fc reads what they are fed, behind the rows' slots; it is no input of a supervised slot."""
    draft = tiny_peagle(target())
    small = calibrated(draft, target(), batches(1), Quant("fp8", "all_linear"))
    assert isinstance(small.fc, QuantisedLinear)
    moments, (batch,) = Moments(tiny_peagle(target()).float(), Quant("fp8", "all_linear")), batches(1)
    moments.add_batch(batch, target())
    layers = draft.config.target_layers
    states = TargetStates.split(
        target().states(layers)(batch.tokens, batch.positions, packed_attention(batch.lengths)), layers
    )
    fed = shift_hidden(torch.cat([states.layers[each] for each in layers], -1), batch.positions)[batch.supervised]
    torch.testing.assert_close(moments.sums["fc"], fed.t() @ fed, rtol=1e-4, atol=1e-4)


def test_each_of_several_modules_is_calibrated():
    moments = Moments(tiny_mtp(target(), modules=2).float(), Quant("fp8", "all_linear"))
    moments.add_batch(*batches(1), target())
    assert {"fc", "further.0.fc", "layers.1.mlp.down_proj"} < moments.sums.keys()
    assert all(each.any() for each in moments.sums.values())


def test_an_expert_that_no_token_chose_is_rounded_to_nearest():
    draft, quant = tiny_draft(target(), ffn="moe", num_experts=3), Quant("int4")
    for layer in draft.layers:
        layer.mlp.router.weight[1] = 0
        layer.mlp.router.weight[2] = -layer.mlp.router.weight[0]  # one of the two is always above 0
    small, nearest = calibrated(draft, target(), batches(2), quant), quantise_draft(draft, quant)
    for index, layer in enumerate(small.layers):
        for part in ("gate_proj", "up_proj", "down_proj"):
            same = [
                torch.equal(getattr(ours, part).codes, getattr(other, part).codes)
                for ours, other in zip(layer.mlp.experts, nearest.layers[index].mlp.experts, strict=True)
            ]
            assert same == [False, True, False]


@pytest.mark.parametrize(
    ("draft", "tokens", "message"),
    [
        ({}, 0, "tokens=0: must be at least 1"),
        ({"intermediate_size": 192}, 1, "quant.scheme=int4: layers.0.mlp.down_proj of the draft has 128 outputs"),
    ],
)
def test_mistakes_are_told_before_any_batch_is_drawn(draft, tokens, message):
    drawn = (pytest.fail("drew a batch") for _ in range(1))
    with pytest.raises(UserError) as raised:
        calibrated(tiny_draft(target(), **draft), target(), drawn, Quant("int4"), tokens)
    assert str(raised.value).startswith(message)
