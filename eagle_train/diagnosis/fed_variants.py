"""Changes of what the draft is fed that `conventions` tries: hidden states of another token, layer or norm, and
embeddings of another scale.

Knows nothing of what a change gains.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from eagle_train.diagnosis.measure import Change, Variant
from eagle_train.drafts import Draft, TargetStates
from eagle_train.drafts.kind import Rows
from eagle_train.models.forward import decoder_of
from eagle_train.models.target import Target

LEAKED = 0.95
"""The least acceptance at depth 1 with which a change counts that hands the draft what it is to predict: the token's
own hidden state tells the next token to whoever passes it on, and a draft that was trained so is never wrong."""


def fed_variants(target: Target, draft: Draft) -> Iterator[Variant]:
    """All that can be asked of the draft's kind."""
    yield from _shifted(draft)
    yield from _norms(target, draft)
    yield from _layers(target, draft)
    if not draft.config.at_once:
        yield from _embeddings(target, draft)


def wanted_layers(draft: Draft, count: int) -> tuple[int, ...]:
    """The target's layers, of `count`, whose outputs the variants of a draft are fed."""
    own = draft.config.target_layers
    near = {each + step for each in own for step in (-1, 0, 1)} if own else set()
    if draft.config.fed_hidden:
        near |= {count - 2, count - 1}
    return tuple(sorted(each for each in near if 0 <= each < count))


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
    """The target's final norm on what the draft is fed."""
    final, count = getattr(decoder_of(target.model), "norm", None), target.config.num_hidden_layers
    if draft.config.fed_hidden and final is not None:
        norm = copy.deepcopy(final).float()

        def before(rows: Rows) -> Rows:
            return _with_hidden(rows, rows.states.layers[count - 1])

        def twice(rows: Rows) -> Rows:
            return _with_hidden(rows, norm(rows.states.hidden))

        yield Variant("norm", "the target's hidden states before its final norm", draft, before)
        yield Variant("norm", "the target's final norm applied once more to its hidden states", draft, twice)


def _layers(target: Target, draft: Draft) -> Iterator[Variant]:
    """States of the layers before or after."""
    count, own = target.config.num_hidden_layers, draft.config.target_layers

    def moved(by: int) -> Change:
        def change(rows: Rows) -> Rows:
            layers = rows.states.layers
            return replace(rows, states=TargetStates(rows.states.hidden, {each: layers[each + by] for each in own}))

        return change

    for by, where in ((-1, "before"), (1, "after")):
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


def _with_hidden(rows: Rows, hidden: torch.Tensor) -> Rows:
    return replace(rows, states=TargetStates(hidden, rows.states.layers))
