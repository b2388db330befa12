"""Changes of the draft itself that `conventions` tries: its positions, switches, vocabulary, matrices and final norm.

They are wrong in ways that are known: another base, ids for offsets, a matrix the other way round. Knows nothing of
what a change gains.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from eagle_train.diagnosis.measure import Variant
from eagle_train.drafts import Draft
from eagle_train.drafts.rope import rope_parameters_of
from eagle_train.errors import UserError, shown
from eagle_train.models.forward import decoder_of
from eagle_train.models.layers import Rotary
from eagle_train.models.target import Target

_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def own_variants(target: Target, draft: Draft) -> Iterator[Variant]:
    """All that can be asked of the draft's kind."""
    if draft.config.attention_width:
        yield from _rope(target, draft)
        yield from _flags(draft)
    yield from _norms(target, draft)
    if draft.vocabulary is not None and draft.own_head() is not None:
        yield from _vocabularies(target, draft)
    yield from _matrices(draft)


def _rebuilt(draft: Draft, **changes: Any) -> Draft:
    """The same weights in a draft of another config."""
    made = replace(draft.config, **changes).module()
    made.load_state_dict(draft.state_dict())
    return made.to(next(draft.parameters()).device).eval().requires_grad_(False)


def _rope(target: Target, draft: Draft) -> Iterator[Variant]:
    """The target's settings, and the plain ones, where the draft has others. They are told apart by their angles."""
    own = draft.get_submodule("rotary")
    assert isinstance(own, Rotary)
    known = [own.frequencies]
    for whose, settings in (("the target's", rope_parameters_of(target.config)), ("the plain", _DEFAULT_ROPE)):
        try:
            made = _rebuilt(draft, rope_parameters=settings)
        except UserError:  # of a target without rotary positions, or whose factors are for heads of another width
            continue
        other: Any = made.get_submodule("rotary")
        if all(other.frequencies.shape != each.shape or not torch.equal(other.frequencies, each) for each in known):
            known.append(other.frequencies)
            yield Variant("rope", f"{whose} rotary positions, {shown(settings)}", made)


def _flags(draft: Draft) -> Iterator[Variant]:
    """Conventions that are a switch in the config and have no tensor."""
    names = {each.name for each in fields(draft.config)}
    for name in ("norm_before_residual", "norm_output"):
        if name in names and not draft.config.in_one_pass:
            flipped = not getattr(draft.config, name)
            yield Variant("norm", f"{name}={str(flipped).lower()}", _rebuilt(draft, **{name: flipped}))
    other = "skip" if draft.config.first_token == "self_fusion" else "self_fusion"
    yield Variant("first_token", f"first_token={other}", draft.attending(first_token=other))


def _norms(target: Target, draft: Draft) -> Iterator[Variant]:
    """A norm at the draft's end."""
    final = getattr(decoder_of(target.model), "norm", None)
    own = {name: module for name, module in draft.named_modules() if name.rpartition(".")[2] == "norm"}
    if own and not any(isinstance(module, nn.Identity) for module in own.values()):
        yield Variant("norm", "the draft's final norm left out", _replaced(draft, own, nn.Identity()))
    elif own and final is not None:
        made = _replaced(draft, own, copy.deepcopy(final).float())
        yield Variant("norm", "the target's final norm at the draft's end", made)


def _vocabularies(target: Target, draft: Draft) -> Iterator[Variant]:
    """Other readings of the map: shifted by one, ids taken for offsets, and offsets for ids."""
    tokens, size = draft.vocabulary, target.identity.vocab_size
    assert tokens is not None
    places = torch.arange(len(tokens), device=tokens.device)
    readings = {
        "every token one lower": tokens - 1,
        "every token one higher": tokens + 1,
        "d2t read as token ids": tokens - places,
        "d2t read as offsets": tokens + places,
    }
    for said, other in readings.items():
        if bool(((other >= 0) & (other < size)).all()) and not torch.equal(other, tokens):
            made = copy.deepcopy(draft)
            made.vocabulary = other
            yield Variant("vocabulary", said, made)


def _matrices(draft: Draft) -> Iterator[Variant]:
    """Matrices that converters swap or turn: halves of fc, the order of fused layers, gate and up, square ones."""
    modules = dict(draft.named_modules())
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
        if name.rpartition(".")[2] == "fc" and isinstance(module, nn.Linear):
            parts = torch.cat(module.weight.split(draft.config.hidden_size, dim=1)[::-1], 1)
            yield Variant("tensor", f"the parts of {name} in the reverse order", _weighing(draft, {name: parts}))
        if name.endswith("o_proj") and weight is not None and weight.shape[0] == weight.shape[1]:
            yield Variant("tensor", f"{name} transposed", _weighing(draft, {name: weight.t()}))
        if name.endswith(".gate_proj"):
            up = name.replace("gate_proj", "up_proj")
            swapped = {name: modules[up].weight, up: weight}
            yield Variant("tensor", f"{name} and up_proj exchanged", _weighing(draft, swapped))


def _weighing(draft: Draft, weights: dict[str, Any]) -> Draft:
    """A copy with these weights in the modules of these names."""
    made = copy.deepcopy(draft)
    for name, weight in weights.items():
        made.get_submodule(name).weight = nn.Parameter(weight.detach().clone().contiguous(), requires_grad=False)
    return made


def _replaced(draft: Draft, names: Iterable[str], module: nn.Module) -> Draft:
    """A copy with this module in the place of each of these."""
    made = copy.deepcopy(draft)
    for name in names:
        made.set_submodule(name, module)
    return made
