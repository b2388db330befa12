"""drafts/peagle.py: losses and gradients of a plain float64 twin, slot by slot; and settings."""

from dataclasses import replace

import pytest
import torch

from eagle_train.drafts import Head, Lesson, PeagleConfig, PeagleDraft, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.errors import UserError
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.kernels import plain
from eagle_train.training.parallelize import recomputed
from tests.support.graph_recorder import no_values
from tests.support.step_twins import STEPS, PeagleTwin, exact_target, rows_of, slots_of, twin_loss
from tests.support.tiny import shared_target, tiny_model, tiny_peagle, tiny_target

KINDS = [
    {},
    {"num_layers": 1, "loss": "hard", "mask_token": 7},
    {"fc_norm": True, "norm_before_residual": True, "loss": "lk", "first_token": "self_fusion"},
    {"norm_before_fc": True, "vocab_size": 40, "vocabulary": list(range(3, 83, 2)), "layers": [2]},
]
IDS = ["default", "one layer, hard", "norms before, lk, self fusion", "draft vocabulary, one fused layer"]


def exact_draft(target: Target, **kind) -> PeagleDraft:
    return tiny_peagle(target, **{"steps": STEPS} | kind).double().requires_grad_(True)


@pytest.mark.parametrize("way", ["cpu", "tiled", "recomputed"])
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_losses_and_gradients_are_the_twins(kind, way):
    target = exact_target()
    draft = exact_draft(target, **kind)
    rows, supervised = rows_of(target, draft.config.target_layers)
    expected = twin_loss(PeagleTwin(draft, target), rows, supervised)
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
    assert sums.rows == len(slots[0])


def test_one_pass_is_the_first_of_several():
    target = exact_target()
    draft = exact_draft(target)
    rows, _ = rows_of(target, draft.config.target_layers)
    one, all_of_them = (draft.unrolled(draft, rows, passes) for passes in (1, STEPS))
    torch.testing.assert_close(one, all_of_them[:1], rtol=1e-12, atol=1e-12)
    assert len(draft.unrolled(draft, rows, STEPS + 3)) == draft.config.levels == draft.config.passes(1) == STEPS


def test_a_mask_slot_knows_the_text_up_to_its_root_and_no_more():
    """What pass k has at slot j changes with the token at slot j - k, and with none behind it."""
    target = exact_target()
    draft = exact_draft(target)
    rows, _ = rows_of(target, draft.config.target_layers)
    place = 4  # of the first row's first document, which has 9 slots
    other = rows.embeddings.clone()
    other[0, place] = rows.embeddings[0, place + 1]
    before = draft.unrolled(draft, rows, STEPS)
    after = draft.unrolled(draft, replace(rows, embeddings=other), STEPS)
    for behind, (one, another) in enumerate(zip(before, after, strict=True)):
        changed = (one != another).any(-1)[0, behind:9]
        assert not changed[:place].any()
        assert changed[place:].all()


def test_no_device_is_waited_for():
    target = shared_target()
    draft = tiny_peagle(target, steps=STEPS).requires_grad_(True)
    rows, supervised = rows_of(target, draft.config.target_layers)
    slots, head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
    with no_values():
        states = draft.unrolled(draft, rows, STEPS)
        draft.losses(states, slots, rows.states.hidden, head, Lesson(), 1.0)


def test_what_is_kept_grows_as_the_tokens_do():
    target = shared_target()
    draft = tiny_peagle(target, steps=5).requires_grad_(True)

    def kept(length: int) -> int:
        sizes = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
            return x

        states = TargetStates(torch.randn(1, length, 32), {layer: torch.randn(1, length, 32) for layer in (0, 1)})
        positions = torch.arange(length)[None]
        rows = Rows(torch.randn(1, length, 32), states, positions, [[length]], target.embed)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            draft.unrolled(draft, rows, 5)
        return sum(size for size, _ in sizes.values())

    weights = sum(parameter.nbytes for parameter in draft.parameters())
    once, twice = (kept(length) - weights for length in (256, 512))
    assert twice <= 2.01 * once


def test_products_are_in_the_targets_dtype_and_gradients_in_the_weights():
    target = tiny_target(dtype=torch.bfloat16)
    draft = tiny_peagle(target, steps=STEPS).requires_grad_(True)
    rows, supervised = rows_of(target, draft.config.target_layers)
    slots, head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
    with torch.autocast("cpu", torch.bfloat16):
        states = draft.unrolled(draft, rows, STEPS)
        sums = draft.losses(states, slots, rows.states.hidden, head, Lesson(), 1.0)
    sums.loss.backward()
    assert states[1].dtype == torch.bfloat16
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in draft.parameters())


# --- the module


def test_slots_behind_the_targets_states_are_mask_slots():
    target = shared_target()
    draft, generator = tiny_peagle(target), torch.Generator().manual_seed(0)
    embeddings, layers = torch.randn(2, 7, 32, generator=generator), torch.randn(2, 4, 64, generator=generator)
    positions, attend = torch.arange(7).expand(2, -1), packed_attention([[7], [7]])
    found = draft(embeddings, layers, positions, attend, fuses=True)
    fed = torch.cat((draft.fc(layers), draft.masked().expand(2, 3, -1)), 1)
    torch.testing.assert_close(found, draft(embeddings, fed, positions, attend))
    assert torch.equal(draft.masked().flatten(), draft.fc(draft.mask_hidden))
    assert draft.read(found).shape == (2, 7, 32)


def test_a_fresh_draft_has_a_mask_like_states():
    target = shared_target()
    draft = PeagleDraft(PeagleConfig.from_target(target.config, layers=[1, 2]))
    assert all(parameter.isnan().all() for parameter in draft.parameters())
    draft.init_weights(0, target.lm_head)
    assert all(parameter.isfinite().all() for parameter in draft.parameters())
    assert 0.7 < draft.mask_hidden.std() < 1.3
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)
    other = PeagleDraft(draft.config).init_weights(0, target.lm_head)
    assert torch.equal(draft.mask_hidden, other.mask_hidden)


def test_the_mask_token_is_the_targets_last_unless_told():
    text = tiny_model(num_hidden_layers=12).config
    assert PeagleConfig.from_target(text).mask_token == 95
    assert PeagleConfig.from_target(text).num_layers == 4
    assert PeagleConfig.from_target(text, mask_token=0).mask_token == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"steps": 1}, r"^draft\.steps=1: must be at least 2; one token in a forward is draft=eagle3$"),
        ({"mask_token": 96}, r"^draft\.mask_token=96: must be a token id of the target, below 96$"),
        ({"mask_token": -1}, r"^draft\.mask_token=-1: must be a token id of the target, below 96$"),
        ({"norm_output": False}, r"^draft\.norm_output=false: draft=peagle feeds no slot's output to another; leave"),
        ({"layers": [1, 3]}, r"draft\.layers=\[1, 3\]: must be numbers from 1 to 2, in ascending order"),
        ({"decay": 0.0}, r"draft\.decay=0\.0: must be above 0 and at most 1"),
    ],
)
def test_impossible_values_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        PeagleConfig.from_target(tiny_model().config, **{"layers": [1]} | override)


def test_other_settings_of_training_fit_the_same_weights():
    draft = tiny_peagle(shared_target(), first_token="skip")
    shape = replace(draft.config, first_token="self_fusion", steps=3, decay=1.0, loss="lk")
    fitted = draft.fitted(shape)
    assert fitted.config == shape
    assert torch.equal(fitted.mask_hidden, draft.mask_hidden)
