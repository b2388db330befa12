"""drafts/mtp.py: losses and gradients of a plain float64 twin, slot by slot; what a target's own module is called; and
settings."""

from dataclasses import replace

import pytest
import torch

from eagle_train.drafts import Head, Lesson, MtpConfig, MtpDraft, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.errors import UserError
from eagle_train.models.fused import fuse_products
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.kernels import plain
from eagle_train.training.parallelize import recomputed
from tests.support.graph_recorder import no_values
from tests.support.step_twins import STEPS, MtpTwin, exact_target, modules_loss, rows_of, slots_of, twin_loss
from tests.support.tiny import shared_target, tiny_model, tiny_mtp, tiny_target

KINDS = [
    {},
    {"loss": "hard", "vocab_size": 40, "vocabulary": list(range(3, 83, 2))},
    {"loss": "lk", "first_token": "self_fusion", "decay": 0.5},
    {"window": 3, "sink": True, "first_token": "self_fusion"},
    {"modules": 4},
    {"modules": 2, "first_token": "self_fusion", "loss": "lk", "decay": 0.5},
    {"modules": 3, "window": 3, "sink": True},
]
IDS = ["default", "hard, draft vocabulary", "lk, self fusion", "window, sink, self fusion"]
IDS += ["four modules", "two modules, lk, self fusion", "three modules, window, sink"]


def exact_draft(target: Target, **kind) -> MtpDraft:
    return tiny_mtp(target, steps=STEPS, **kind).double().requires_grad_(True)


@pytest.mark.parametrize("way", ["cpu", "tiled", "recomputed"])
@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_losses_and_gradients_are_the_twins(kind, way):
    target = exact_target()
    draft = exact_draft(target, **kind)
    rows, supervised = rows_of(target, ())
    loss = modules_loss if draft.config.modules > 1 else twin_loss
    expected = loss(MtpTwin(draft, target), rows, supervised)
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
    rows, supervised = rows_of(target, ())
    told = {}
    for loss in ("soft", "hard", "lk"):
        draft = exact_draft(target, loss=loss)
        slots, head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
        sums = draft.losses(draft.unrolled(draft, rows, STEPS), slots, rows.states.hidden, head, Lesson(), 1.0)
        told[loss] = (sums.ce.item(), sums.agree.item())
    assert told["soft"] == told["hard"] == told["lk"]
    (state,) = draft.unrolled(draft, rows, 1)
    logits = draft.logits(state, head).flatten(0, 1)[slots[0]].double()
    p = target.lm_head(rows.states.hidden.flatten(0, 1)[slots[0]]).softmax(-1)
    assert told["lk"][0] == pytest.approx(-(p * logits.log_softmax(-1)).sum().item(), rel=1e-6)


@pytest.mark.parametrize(("family", "rounded"), [("gemma2", False), ("llama", True)])
def test_both_logits_are_the_targets_heads(family, rounded):
    """Soft caps and biases are in the draft's too; products are in the head's dtype, gradients in the weights'."""
    target = tiny_target(family, dtype=torch.bfloat16 if rounded else torch.float32)
    draft = tiny_mtp(target, steps=1).requires_grad_(True)
    rows, supervised = rows_of(target, ())
    (slots, *_), head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
    with torch.autocast("cpu", torch.bfloat16, enabled=rounded):
        (state,) = draft.unrolled(draft, rows, 1)
        sums = draft.losses([state], [slots], rows.states.hidden, head, Lesson(), 1.0)
    sums.loss.backward()
    logits = target.lm_head(draft.read(state).detach().flatten(0, 1)[slots].to(target.dtype)).float()
    p = target.lm_head(rows.states.hidden.flatten(0, 1)[slots]).float().softmax(-1)
    expected = -(p * logits.log_softmax(-1)).sum()
    assert sums.loss.item() == pytest.approx(expected.item(), rel=2e-2 if rounded else 1e-5)
    assert all(each.grad.dtype == torch.float32 and each.grad.isfinite().all() for each in draft.parameters())


def test_no_device_is_waited_for():
    target = shared_target()
    draft = tiny_mtp(target, steps=STEPS).requires_grad_(True)
    rows, supervised = rows_of(target, ())
    slots, head = slots_of(draft, rows, supervised), Head(draft, target.lm_head)
    with no_values():
        states = draft.unrolled(draft, rows, STEPS)
        draft.losses(states, slots, rows.states.hidden, head, Lesson(), 1.0)


@pytest.mark.parametrize("modules", [1, 3])
def test_what_is_kept_grows_as_the_tokens_do(modules):
    draft = tiny_mtp(shared_target(), modules=modules).requires_grad_(True)

    def kept(length: int) -> int:
        sizes = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
            return x

        states = TargetStates(torch.randn(1, length, 32), {})
        rows = Rows(torch.randn(1, length, 32), states, torch.arange(length)[None], [[length]])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            draft.unrolled(draft, rows, 5)
        return sum(size for size, _ in sizes.values())

    weights = sum(parameter.nbytes for parameter in draft.parameters())
    once, twice = (kept(length) - weights for length in (256, 512))
    assert twice <= 2.01 * once


@pytest.mark.parametrize("is_fused", [False, True])
def test_what_is_wanted_is_as_if_all_were(is_fused):
    draft = tiny_mtp(shared_target())
    draft = fuse_products(draft) if is_fused else draft
    embeddings, hidden = torch.randn(2, 2, 9, 32, generator=torch.Generator().manual_seed(0))
    positions, attend = torch.arange(9).expand(2, -1), packed_attention([[9], [9]])
    whole = draft(embeddings, hidden, positions, attend)
    wanted = torch.tensor([[3, 8], [0, 5]])
    found = draft(embeddings, hidden, positions, attend, wanted)
    torch.testing.assert_close(found, whole.take_along_dim(wanted.unsqueeze(2), 1))
    assert draft.read(whole).shape == draft.fed(whole).shape == (2, 9, 32)
    torch.testing.assert_close(draft.read(whole), draft.norm(draft.fed(whole)))


def test_a_targets_own_module_is_called_as_deepseeks():
    own = tiny_mtp(shared_target()).in_target(61)
    assert own.names.keys() == dict(tiny_mtp(shared_target()).named_parameters()).keys()
    attention, mlp = (
        (f"self_attn.{name}_proj" for name in "qkvo"),
        (f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    expected = {f"model.layers.61.{name}.weight" for name in ("eh_proj", *norms, *attention, *mlp)}
    assert set(own.names.values()) == expected
    assert own.names["norm.weight"] == "model.layers.61.shared_head.norm.weight"
    assert own.names["fc.weight"] == "model.layers.61.eh_proj.weight"
    assert own.shared.keys() == {
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
    }


def test_a_chain_of_modules_is_in_its_targets_next_layers():
    one, two = (tiny_mtp(shared_target(), modules=modules).in_target(61) for modules in (1, 2))
    assert (one.prefixes, two.prefixes) == (("model.layers.61.",), ("model.layers.61.", "model.layers.62."))
    assert dict(one.names).items() <= dict(two.names).items()
    second = {theirs.replace(".61.", ".62.") for theirs in one.names.values()}
    assert set(two.names.values()) == {*one.names.values(), *second}
    assert two.names["further.0.norm.weight"] == "model.layers.62.shared_head.norm.weight"
    assert two.names["layers.1.mlp.up_proj.weight"] == "model.layers.62.mlp.up_proj.weight"
    assert set(two.shared) == {*one.shared, *(name.replace(".61.", ".62.") for name in one.shared)}


def test_a_module_sees_its_own_slots_alone():
    """Module k has none at a document's first k - 1, and nobody sees what is there."""
    target = exact_target()
    draft = exact_draft(target, modules=3)
    rows, _ = rows_of(target, ())
    states = draft.unrolled(draft, rows, 3)

    def forward(embeddings, hidden, positions, attend, module=0):
        none = (positions < 1 + module).unsqueeze(2)  # the first slot is left out besides
        return draft(embeddings, hidden.masked_fill(none, 1e3), positions, attend, module=module)

    for module, (ours, other) in enumerate(zip(states, draft.unrolled(forward, rows, 3), strict=True)):
        own = rows.positions >= 1 + module
        torch.testing.assert_close(ours[own], other[own], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"modules": 0}, r"^draft\.modules=0: must be from 1 to 8$"),
        ({"modules": 9, "steps": 9}, r"^draft\.modules=9: must be from 1 to 8$"),
        ({"modules": 4}, r"^draft\.steps=3: must be at least draft\.modules, 4: each module learns in a pass$"),
        ({"num_layers": 2}, r"draft\.num_layers=2: must be 1, an MTP module is one block"),
        ({"steps": 0}, r"draft\.steps=0: must be at least 1"),
        ({"decay": 1.5}, r"draft\.decay=1\.5: must be above 0 and at most 1"),
        ({"loss": "ce"}, r"draft\.loss=ce: must be soft or hard or lk"),
        ({"qkv_bias": True}, r"draft\.qkv_bias"),
    ],
)
def test_impossible_values_are_refused(override, message):
    with pytest.raises(UserError, match=message):
        MtpConfig.from_target(tiny_model().config, **override)


def test_other_settings_of_training_fit_the_same_weights():
    draft = tiny_mtp(shared_target(), first_token="skip")
    shape = replace(draft.config, first_token="self_fusion", steps=2, decay=1.0, loss="lk")
    fitted = draft.fitted(shape)
    assert fitted.config == shape
    assert not fitted.layers[0].self_attn.rule.skip_first
    assert draft.layers[0].self_attn.rule.skip_first
