"""drafts/medusa.py: losses and gradients of a plain float64 twin, slot by slot; and settings."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from eagle_train.drafts import Head, Lesson, MedusaConfig, MedusaDraft, TargetStates, shift_hidden
from eagle_train.drafts.kind import Rows
from eagle_train.errors import UserError
from eagle_train.models.target import Target
from eagle_train.training.optimizer import by_muon
from eagle_train.training.parallelize import recomputed
from tests.support.graph_recorder import no_values
from tests.support.reference_chains import LENGTHS, documents, slot_loss
from tests.support.step_twins import exact_target, rows_of
from tests.support.tiny import shared_target, tiny_medusa, tiny_model

KINDS = [
    {},
    {"num_layers": 3, "heads": 2, "loss": "hard", "decay": 1.0},
    {"loss": "lk", "heads": 4},
    {"vocab_size": 40, "vocabulary": list(range(3, 83, 2))},
    {"own_head": True, "heads": 3},
    {"own_head": True, "heads": 2, "loss": "lk", "vocab_size": 40, "vocabulary": list(range(3, 83, 2))},
]
IDS = ["default", "three blocks, hard", "lk", "draft vocabulary", "own heads", "own heads, lk, draft vocabulary"]


def exact_draft(target: Target, **kind) -> MedusaDraft:
    return tiny_medusa(target, **kind).double().requires_grad_(True)


def learnt(draft: MedusaDraft, target: Target, rows: Rows, supervised: torch.Tensor, passes: int, scale: float = 1.0):
    """The sums of the losses of the first `passes` heads."""
    masks = (supervised & (rows.positions >= draft.config.first_slot + ahead) for ahead in range(passes))
    slots = [each.flatten().nonzero().squeeze(1) for each in masks]
    states, head = draft.unrolled(draft, rows, passes), Head(draft, target.lm_head)
    return draft.losses(states, slots, rows.states.hidden, head, Lesson(), scale)


def twin_loss(draft: MedusaDraft, target: Target, rows: Rows, supervised: torch.Tensor) -> torch.Tensor:
    """The mean over heads, weighted by decay, one token after the other: head i at token j is to know token j + 1 + i,
    whose distribution the target has at token j + i."""
    w, c = dict(draft.named_parameters()), draft.config
    tokens = draft.vocabulary if draft.vocabulary is not None else torch.arange(96)
    weights, total = [c.decay**ahead for ahead in range(c.heads)], torch.zeros((), dtype=torch.float64)
    for row, place in documents(LENGTHS):
        hidden, wanted = rows.states.hidden[row, place], supervised[row, place]
        for token in range(len(hidden)):
            for head in range(1, c.heads + 1):
                if token + head >= len(hidden) or not wanted[token + head]:
                    continue
                x = hidden[token]
                for block in range(c.num_layers):
                    name = f"layers.{head - 1}.mlp.{block}"
                    x = x + F.silu(w[f"{name}.weight"] @ x + w[f"{name}.bias"])
                logits, of_target = (target.lm_head(each[None])[0, tokens] for each in (x, hidden[token + head]))
                if c.own_head:
                    logits = w[f"lm_head.{head - 1}.weight"] @ x
                total = total + weights[head - 1] / sum(weights) * slot_loss(c.loss, of_target, logits)
    return total


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("way", ["kept", "recomputed"])
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_losses_and_gradients_are_the_twins(kind, way, family):
    """Gemma 2's logits have a soft cap."""
    target = Target(tiny_model(family).double(), name=family)
    draft = exact_draft(target, **kind)
    rows, supervised = rows_of(target, ())
    expected = twin_loss(draft, target, rows, supervised)
    gradients = torch.autograd.grad(expected, list(draft.parameters()))
    for layer in draft.layers if way == "recomputed" else ():
        layer.forward = recomputed(layer.forward)
    sums = learnt(draft, target, rows, supervised, draft.config.heads, scale=0.5)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(0.5 * expected.item(), rel=1e-10)
    for (name, parameter), wanted in zip(draft.named_parameters(), gradients, strict=True):
        assert wanted.any(), name
        assert (parameter.grad - 0.5 * wanted).norm() < 1e-9 * wanted.norm(), name
    assert sums.l1 is None
    assert sums.figures.keys() == {"ce", "top1_agreement"}
    assert sums.rows == supervised.sum()


def test_the_cross_entropy_that_is_told_is_the_first_heads():
    target = exact_target()
    rows, supervised = rows_of(target, ())
    for loss in ("soft", "hard", "lk"):
        draft = exact_draft(target, loss=loss)
        sums, alone = (learnt(draft, target, rows, supervised, passes) for passes in (5, 1))
        assert (sums.ce.item(), sums.agree.item()) == (alone.ce.item(), alone.agree.item())
        assert sums.loss.item() != pytest.approx(alone.loss.item())
        assert (alone.loss.item() == alone.ce.item()) == (loss == "soft")


def test_products_are_in_the_targets_dtype_and_gradients_in_the_weights():
    target = Target(tiny_model().bfloat16(), name="tiny-llama")
    draft = tiny_medusa(target).requires_grad_(True)
    rows, supervised = rows_of(target, ())
    with torch.autocast("cpu", torch.bfloat16):
        sums = learnt(draft, target, rows, supervised, 5)
    sums.loss.backward()
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in draft.parameters())
    exact = Target(tiny_model().bfloat16().double(), name="tiny-llama")
    wide = Rows(rows.embeddings.double(), TargetStates(rows.states.hidden.double(), {}), rows.positions, LENGTHS)
    expected = learnt(draft.double(), exact, wide, supervised, 5)
    assert sums.loss.item() == pytest.approx(expected.loss.item(), rel=2e-2)


def test_no_device_is_waited_for():
    target = shared_target()
    draft = tiny_medusa(target).requires_grad_(True)
    rows, supervised = rows_of(target, ())
    slots = [(supervised & (rows.positions > ahead)).flatten().nonzero().squeeze(1) for ahead in range(5)]
    head = Head(draft, target.lm_head)
    with no_values():
        draft.losses(draft.unrolled(draft, rows, 5), slots, rows.states.hidden, head, Lesson(), 1.0)


# --- the module


def test_no_deeper_pass_than_there_are_heads():
    draft, (rows, _) = tiny_medusa(shared_target(), heads=2), rows_of(shared_target(), ())
    assert [len(draft.unrolled(draft, rows, passes)) for passes in (1, 2, 7)] == [1, 2, 2]
    assert draft.config.levels == draft.config.passes(1) == 2


def test_a_fresh_head_proposes_what_the_lm_head_says():
    target = shared_target()
    draft = MedusaDraft(MedusaConfig.from_target(target.config, heads=3, num_layers=2))
    assert all(parameter.isnan().all() for parameter in draft.parameters())
    rows, _ = rows_of(target, ())
    states = draft.init_weights(0, target.lm_head).unrolled(draft, rows, 3)
    before = shift_hidden(rows.states.hidden, rows.positions)
    for ahead, state in enumerate(states):
        assert torch.equal(state, before.roll(ahead, dims=1))


@pytest.mark.parametrize("few", [{}, {"vocab_size": 3, "vocabulary": [3, 5, 90]}], ids=["all", "few"])
def test_a_fresh_heads_own_lm_head_is_the_targets_rows(few):
    target = shared_target()
    draft = MedusaDraft(MedusaConfig.from_target(target.config, heads=3, own_head=True, **few))
    draft.init_weights(0, target.lm_head)
    rows = target.lm_head.weight[few.get("vocabulary", slice(None))]
    for level in range(3):
        own = draft.own_head(level)
        assert own is not None
        assert torch.equal(own.weight, rows)
    assert not any(each.any() for each in draft.layers.parameters())
    assert by_muon(draft) == [head.mlp[0].weight for head in draft.layers]


def test_logits_are_of_the_levels_own_lm_head():
    target = shared_target()
    draft, states = tiny_medusa(target, own_head=True, heads=3), torch.randn(4, 32)
    for level, own in enumerate(draft.lm_head):
        found = draft.logits(states, Head(draft, target.lm_head), level)
        torch.testing.assert_close(found, states @ own.get_parameter("weight").T)


def test_what_is_wanted_is_as_if_all_were():
    draft, hidden = tiny_medusa(shared_target()), torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    wanted = torch.tensor([[3, 8], [0, 5]])
    found, whole = draft(None, hidden, wanted=wanted), draft(None, hidden)
    assert found.shape == (2, 2, 5 * 32)
    torch.testing.assert_close(found, whole.take_along_dim(wanted.unsqueeze(2), 1))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"heads": 0}, r"^draft\.heads=0: must be at least 1$"),
        ({"num_layers": 0}, r"^draft\.num_layers=0: must be at least 1$"),
        ({"decay": 1.5}, r"^draft\.decay=1\.5: must be above 0 and at most 1$"),
        ({"loss": "ce"}, r"^draft\.loss=ce: must be soft or hard or lk$"),
        ({"first_token": "self_fusion"}, r"^draft\.first_token=self_fusion: must be skip$"),
        ({"num_heads": 2}, r"^draft\.num_heads=2: Medusa heads have no attention; leave it out$"),
        ({"window": 8}, r"^draft\.window=8: Medusa heads have no attention; leave it out$"),
        ({"sink": True}, r"^draft\.sink=True: Medusa heads have no attention; leave it out$"),
        ({"norms": "full"}, r"draft\.norms"),
    ],
)
def test_impossible_values_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        MedusaConfig.from_target(tiny_model().config, **override)


def test_other_settings_of_training_fit_the_same_weights():
    draft = tiny_medusa(shared_target())
    shape = replace(draft.config, decay=1.0, loss="lk")
    fitted = draft.fitted(shape)
    assert fitted.config == shape
    assert draft.config.loss == "soft"
    assert all(map(torch.equal, fitted.parameters(), draft.parameters()))
