"""The changes of a draft's conventions that `conventions` tries: each differs from the draft in one of them.

Most conventions are wrong in ways that are known: a shift by one, a norm too many, another layer, a matrix the other
way round. Knows nothing of what a change gains.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from eagle_train.diagnosis.measure import Change
from eagle_train.drafts import Draft, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.drafts.rope import rope_parameters_of
from eagle_train.errors import shown
from eagle_train.models.forward import decoder_of
from eagle_train.models.layers import Rotary
from eagle_train.models.target import Target

LEAKED = 0.95
"""The least acceptance at depth 1 with which a change counts that hands the draft what it is to predict: the token's
own hidden state tells the next token to whoever passes it on, and a draft that was trained so is never wrong."""
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True, eq=False)
class Variant:
    """A draft, and a change of what it is fed, that differ from the examined draft in one convention. `said`: what was
    changed, in words that follow "with". `least`: the acceptance at depth 1 below which it is not told."""

    cause: str
    said: str
    draft: Draft
    change: Change = lambda rows: rows
    least: float = 0.0


def wanted_layers(draft: Draft, count: int) -> tuple[int, ...]:
    """The target's layers, of `count`, whose outputs the variants of a draft are fed."""
    own = draft.config.target_layers
    near = {each + step for each in own for step in (-1, 0, 1)} if own else set()
    if draft.config.fed_hidden:
        near |= {count - 2, count - 1}
    return tuple(sorted(each for each in near if 0 <= each < count))


def variants(target: Target, draft: Draft) -> Iterator[Variant]:
    """All changes that can be asked of the draft's kind."""
    if draft.config.attention_width:
        yield from _rope(target, draft)
        yield from _flags(draft)
    yield from _shifted(draft)
    yield from _norms(target, draft)
    yield from _layers(target, draft)
    if not draft.config.at_once:
        yield from _embeddings(target, draft)
    if draft.vocabulary is not None and draft.own_head() is not None:
        yield from _vocabularies(target, draft)
    yield from _matrices(draft)


def rebuilt(draft: Draft, **changes: Any) -> Draft:
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
        made = rebuilt(draft, rope_parameters=settings)
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
            yield Variant("norm", f"{name}={str(flipped).lower()}", rebuilt(draft, **{name: flipped}))
    other = "skip" if draft.config.first_token == "self_fusion" else "self_fusion"
    yield Variant("first_token", f"first_token={other}", draft.attending(first_token=other))


def _shifted(draft: Draft) -> Iterator[Variant]:
    """Hidden states that lie one token earlier or later beside the tokens."""

    def rolled(by: int) -> Change:
        def change(rows: Rows) -> Rows:
            states = rows.states
            layers = {layer: each.roll(by, 1) for layer, each in states.layers.items()}
            return replace(rows, states=TargetStates(states.hidden.roll(by, 1), layers))

        return change

    said = "the hidden state of the token itself in place of the one before"
    if not draft.config.at_once:  # heads that pass their input on, as fresh ones do, are no sign of anything
        yield Variant("positions", said, draft, rolled(-1), LEAKED)
    yield Variant("positions", "the hidden state of one token earlier", draft, rolled(1))


def _norms(target: Target, draft: Draft) -> Iterator[Variant]:
    """The target's final norm on what the draft is fed, and the draft's own at its end."""
    final, count = getattr(decoder_of(target.model), "norm", None), target.config.num_hidden_layers
    if draft.config.fed_hidden and final is not None:
        norm = copy.deepcopy(final).float()

        def before(rows: Rows) -> Rows:
            return _with_hidden(rows, rows.states.layers[count - 1])

        def twice(rows: Rows) -> Rows:
            return _with_hidden(rows, norm(rows.states.hidden))

        yield Variant("norm", "the target's hidden states before its final norm", draft, before)
        yield Variant("norm", "the target's final norm applied once more to its hidden states", draft, twice)
    own = getattr(draft, "norm", None)
    if own is not None and not isinstance(own, nn.Identity):
        yield Variant("norm", "the draft's final norm left out", _replaced(draft, "norm", nn.Identity()))
    elif own is not None and final is not None:
        made = _replaced(draft, "norm", copy.deepcopy(final).float())
        yield Variant("norm", "the target's final norm at the draft's end", made)


def _layers(target: Target, draft: Draft) -> Iterator[Variant]:
    """States of the layers before or after."""
    count, own = target.config.num_hidden_layers, draft.config.target_layers

    def moved(by: int) -> Change:
        def change(rows: Rows) -> Rows:
            layers = rows.states.layers
            return replace(rows, states=TargetStates(rows.states.hidden, {each: layers[each + by] for each in own}))

        return change

    for by, where in ((-1, "before"), (1, "behind")):
        if own and all(0 <= each + by < count for each in own):
            yield Variant("layer", f"the states one layer {where}", draft, moved(by))
    final = getattr(decoder_of(target.model), "norm", None)
    if draft.config.fed_hidden and final is not None and count > 1:
        norm = copy.deepcopy(final).float()

        def earlier(rows: Rows) -> Rows:
            return _with_hidden(rows, norm(rows.states.layers[count - 2]))

        yield Variant("layer", "the states of the last layer but one", draft, earlier)


def _embeddings(target: Target, draft: Draft) -> Iterator[Variant]:
    """Embeddings that some families, and some trainers, scale."""
    width, own = math.sqrt(draft.config.hidden_size), target.embedding_scale()
    scales = {width, 1 / width, own, 1 / own} - {1.0}

    def scaled(by: float) -> Change:
        def change(rows: Rows) -> Rows:
            embed = rows.embed
            again = None if embed is None else lambda tokens: by * embed(tokens)
            return replace(rows, embeddings=by * rows.embeddings, embed=again)

        return change

    for scale in sorted(scales):
        yield Variant("embedding", f"embeddings times {scale:.4g}", draft, scaled(scale))


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
    fc = modules.get("fc")
    if isinstance(fc, nn.Linear):
        parts = fc.weight.split(draft.config.hidden_size, dim=1)
        yield Variant(
            "tensor", "the parts of fc in the reverse order", _weighing(draft, {"fc": torch.cat(parts[::-1], 1)})
        )
    for name, module in modules.items():
        weight = getattr(module, "weight", None)
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


def _replaced(draft: Draft, name: str, module: nn.Module) -> Draft:
    made = copy.deepcopy(draft)
    setattr(made, name, module)
    return made


def _with_hidden(rows: Rows, hidden: torch.Tensor) -> Rows:
    return replace(rows, states=TargetStates(hidden, rows.states.layers))
