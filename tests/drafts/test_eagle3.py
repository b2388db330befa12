"""drafts/eagle3.py and own_head.py: losses and gradients of a plain float64 twin, slot by slot; and settings."""

from dataclasses import replace

import pytest
import torch

from eagle_train.drafts import Eagle3Config, Eagle3Draft, Head, Lesson, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.errors import UserError
from eagle_train.models.fused import fuse_products
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.kernels import plain
from eagle_train.training.parallelize import recomputed
from tests.support.graph_recorder import no_values
from tests.support.step_twins import STEPS, Eagle3Twin, exact_target, rows_of, slots_of, twin_loss
from tests.support.tiny import random_tokens, shared_target, tiny_eagle3, tiny_model, tiny_target

KINDS = [
    {},
    {"num_layers": 2, "norm_output": True, "loss": "hard"},
    {"fc_norm": True, "norm_before_residual": True, "loss": "lk", "first_token": "self_fusion"},
    {"norm_before_fc": True, "vocab_size": 40, "vocabulary": list(range(3, 83, 2)), "layers": [2]},
    {"num_layers": 2, "window": 5, "sink": True},
]
IDS = [
    "default",
    "two layers, output normed, hard",
    "norms before, lk, self fusion",
    "draft vocabulary, one fused layer",
    "two layers, window, sink",
]


def exact_draft(target: Target, **kind) -> Eagle3Draft:
    return tiny_eagle3(target, steps=STEPS, **kind).double().requires_grad_(True)


@pytest.mark.parametrize("way", ["cpu", "tiled", "recomputed"])
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_losses_and_gradients_are_the_twins(kind, way):
    target = exact_target()
    draft = exact_draft(target, **kind)
    rows, supervised = rows_of(target, draft.config.target_layers)
    expected = twin_loss(Eagle3Twin(draft, target), rows, supervised)
    gradients = torch.autograd.grad(expected, list(draft.parameters()))
    for layer in draft.layers if way == "recomputed" else ():
        layer.forward = recomputed(layer.forward)
    slots, head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
    with plain("attention") if way == "tiled" else torch.enable_grad():
        states = draft.unrolled(draft, rows, STEPS)
        sums = draft.losses(states, slots, rows.states.hidden, head, Lesson(), scale=0.5)
        sums.loss.backward()
    assert sums.loss.item() == pytest.approx(0.5 * expected.item(), rel=1e-7)  # norms are fp32
    for (name, parameter), wanted in zip(draft.named_parameters(), gradients, strict=True):
        assert wanted.any(), name
        assert (parameter.grad - 0.5 * wanted).norm() < 1e-5 * wanted.norm(), name
    assert sums.l1 is None
    assert sums.figures.keys() == {"ce", "top1_agreement"}
    assert sums.rows == len(slots[0])


def test_the_cross_entropy_that_is_told_is_the_first_passes():
    target = exact_target()
    rows, supervised = rows_of(target, (0, 1))
    told = {}
    for loss in ("soft", "hard", "lk"):
        draft = exact_draft(target, loss=loss)
        slots, head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
        sums = draft.losses(draft.unrolled(draft, rows, STEPS), slots, rows.states.hidden, head, Lesson(), 1.0)
        told[loss] = (sums.ce.item(), sums.agree.item())
        alone = draft.losses(draft.unrolled(draft, rows, 1), slots[:1], rows.states.hidden, head, Lesson(), 1.0)
        assert (alone.ce.item(), alone.agree.item()) == told[loss]
    assert told["soft"] == told["hard"] == told["lk"]
    assert alone.loss.item() != pytest.approx(told["lk"][0])


def test_several_chunks_are_one(monkeypatch):
    target = exact_target()
    draft = exact_draft(target)
    rows, supervised = rows_of(target, draft.config.target_layers)
    given = slots_of(draft, rows, supervised), rows.states.hidden, Head(draft, target.lm_head), Lesson(), 1.0
    found = []
    for chunk in (256, 3):
        monkeypatch.setattr("eagle_train.drafts.own_head.default_chunk_rows", lambda size, device, chunk=chunk: chunk)
        draft.zero_grad()
        draft.losses(draft.unrolled(draft, rows, STEPS), *given).loss.backward()
        found.append(draft.lm_head.weight.grad)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("family", "rounded"), [("gemma2", False), ("llama", True)])
def test_the_targets_own_logits_are_learnt_from(family, rounded):
    """Soft caps and biases are the target's alone; products are in its dtype, gradients in the weights'."""
    target = tiny_target(family, dtype=torch.bfloat16 if rounded else torch.float32)
    draft = tiny_eagle3(target, steps=1).requires_grad_(True)
    rows, supervised = rows_of(target, draft.config.target_layers)
    (slots, *_), head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
    with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        (state,) = draft.unrolled(draft, rows, 1)
        sums = draft.losses([state], [slots], rows.states.hidden, head, Lesson(), 1.0)
    sums.loss.backward()
    logits = draft.read(state).detach().flatten(0, 1)[slots].float() @ draft.lm_head.weight.T
    p = target.lm_head(rows.states.hidden.flatten(0, 1)[slots]).float().softmax(-1)
    expected = -(p * logits.log_softmax(-1)).sum()
    assert sums.loss.item() == pytest.approx(expected.item(), rel=2e-2 if rounded else 1e-5)
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in draft.parameters())


def test_no_device_is_waited_for():
    target = shared_target()
    draft = tiny_eagle3(target, steps=STEPS).requires_grad_(True)
    rows, supervised = rows_of(target, draft.config.target_layers)
    slots, head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
    with no_values():
        states = draft.unrolled(draft, rows, STEPS)
        draft.losses(states, slots, rows.states.hidden, head, Lesson(), 1.0)


def test_what_is_kept_grows_as_the_tokens_do():
    target = shared_target()
    draft = tiny_eagle3(target).requires_grad_(True)

    def kept(length: int) -> int:
        sizes = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
            return x

        states = TargetStates(torch.randn(1, length, 32), {layer: torch.randn(1, length, 32) for layer in (0, 1)})
        rows = Rows(torch.randn(1, length, 32), states, torch.arange(length)[None], [[length]])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            draft.unrolled(draft, rows, 5)
        return sum(size for size, _ in sizes.values())

    weights = sum(parameter.nbytes for parameter in draft.parameters())
    once, twice = (kept(length) - weights for length in (256, 512))
    assert twice <= 2.01 * once


# --- the module


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("kind", [{}, {"num_layers": 3, "norm_before_residual": True}, {"norm_output": True}], ids=str)
def test_what_is_wanted_is_as_if_all_were(kind, is_fused):
    target = shared_target()
    draft = tiny_eagle3(target, **kind)
    draft = fuse_products(draft) if is_fused else draft
    embeddings, hidden = torch.randn(2, 2, 9, 32, generator=torch.Generator().manual_seed(0))
    positions, attend = torch.arange(9).expand(2, -1), packed_attention([[9], [9]])
    whole = draft(embeddings, hidden, positions, attend)
    wanted = torch.tensor([[3, 8], [0, 5]])
    found = draft(embeddings, hidden, positions, attend, wanted)
    torch.testing.assert_close(found, whole.take_along_dim(wanted.unsqueeze(2), 1))
    assert draft.read(whole).shape == draft.fed(whole).shape == (2, 9, 32)


def test_a_fresh_draft_proposes_with_the_targets_rows():
    target = shared_target()
    tokens = [3, 5, 90]
    shape = Eagle3Config.from_target(target.config, layers=[1], vocab_size=3, vocabulary=tokens)
    draft = Eagle3Draft(shape)
    assert all(parameter.isnan().all() for parameter in draft.parameters())
    draft.init_weights(0, target.lm_head)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[tokens])
    assert all(parameter.isfinite().all() for parameter in draft.parameters())
    head = Head(draft, target.lm_head)
    assert head.tokens(torch.tensor([2, 0])).tolist() == [90, 3]


def test_the_default_layers_are_the_engines():
    text = tiny_model(num_hidden_layers=12).config
    assert Eagle3Config.from_target(text).layers == [2, 6, 9]
    assert Eagle3Config.from_target(text).target_layers == (1, 5, 8)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({}, r"draft\.layers=null: a target of 3 layers has no \[2, 1, 0\] in ascending order, .*from 1 to 2"),
        ({"layers": [1, 3]}, r"draft\.layers=\[1, 3\]: must be numbers from 1 to 2, in ascending order"),
        ({"layers": [0, 1]}, r"draft\.layers=\[0, 1\]: must be numbers from 1 to 2"),
        ({"layers": [2, 1]}, r"draft\.layers=\[2, 1\]: must be numbers from 1 on, in ascending order"),
        ({"layers": [1], "steps": 0}, r"draft\.steps=0: must be at least 1"),
        ({"layers": [1], "decay": 0.0}, r"draft\.decay=0\.0: must be above 0 and at most 1"),
        ({"layers": [1], "loss": "ce"}, r"draft\.loss=ce: must be soft or hard or lk"),
        ({"layers": [1], "norms": "full"}, r"draft\.norms"),
    ],
)
def test_impossible_values_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        Eagle3Config.from_target(tiny_model().config, **override)


def test_other_settings_of_training_fit_the_same_weights():
    draft = tiny_eagle3(shared_target(), first_token="skip")
    shape = replace(draft.config, first_token="self_fusion", steps=3, decay=1.0, loss="lk", window=9)
    fitted = draft.fitted(shape)
    assert fitted.config == shape
    assert not fitted.layers[0].self_attn.rule.skip_first
    assert fitted.layers[0].self_attn.rule.window == 9
    assert draft.layers[0].self_attn.rule.skip_first
    assert draft.layers[0].self_attn.rule.window is None
    assert len(random_tokens(3)) == 1
