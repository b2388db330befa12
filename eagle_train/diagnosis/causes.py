"""What can be wrong with a draft, in the order in which findings are told, and what to do about each.

A cause stands before those that it may bring about: a broken file makes a draft look undertrained. Knows nothing of how
anything is measured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Cause(NamedTuple):
    """`title`: what is wrong, in words that begin a sentence. `remedy`: what to do."""

    title: str
    remedy: str


CAUSES: Mapping[str, Cause] = {
    "target": Cause(
        "The draft was made for another target",
        "give the target that it was trained with, or train a draft for this one",
    ),
    "precision": Cause(
        "Rounding or overflow has damaged the draft",
        "export it again with quant=none or dtype=float32, and serve it in bfloat16 or float32",
    ),
    "tensor": Cause(
        "A tensor of the file is not what was trained",
        "export the draft again from its checkpoint, and compare the converter's names and axes",
    ),
    "vocabulary": Cause(
        "The map from the draft's tokens to the target's is wrong",
        "write d2t as offsets, target id minus draft id, with the LM head's rows in the same order",
    ),
    "embedding": Cause(
        "The draft reads another embedding than it was trained with",
        "leave the embedding out of the file, or write the target's own, without a scale of its own",
    ),
    "rope": Cause(
        "The rotary positions are not those of training",
        "set rope_theta and rope_scaling of the draft's config.json to those that it was trained with",
    ),
    "norm": Cause(
        "A norm is left out, applied twice, or another one",
        "compare the norms with the draft's conventions: before the first layer, at the end, and the target's own",
    ),
    "layer": Cause(
        "The draft is fed states of other layers than in training",
        "set the layers' ids in config.json; vLLM counts the layers before a state, SGLang is one lower",
    ),
    "positions": Cause(
        "Tokens, hidden states or positions are off by one against each other",
        "slot j holds token j at position j, beside the target's hidden state of token j-1",
    ),
    "first_token": Cause(
        "The first token is handled otherwise than in training",
        "train with draft.first_token=skip for serving engines",
    ),
    "engine": Cause(
        "The engine computes something else than the training graph",
        "this is a bug of the engine: report it with the token and the stage named here",
    ),
    "template": Cause(
        "The prompts are rendered otherwise than in training",
        "serve with the template and its variables of the training data, or train on prompts as they are served",
    ),
    "off_policy": Cause(
        "The draft knows other texts than those that the target writes",
        "train on the target's own answers: eagle-regenerate writes them",
    ),
    "context": Cause(
        "The draft fails in contexts longer than those of its training",
        "train with a larger data.row_tokens, or give the draft a window (draft.window)",
    ),
    "drift": Cause(
        "The draft cannot go on from its own states",
        "train it on them: more draft.steps, or train.unroll for draft=eagle, and longer",
    ),
    "undertrained": Cause(
        "The draft has learnt too little",
        "train it longer, on more conversations like these",
    ),
}
"""By the names that results.json has."""

_ORDER = {name: place for place, name in enumerate(CAUSES)}


@dataclass(frozen=True)
class Finding:
    """A problem: its `cause`, one of `CAUSES`, what was `measured`, a sentence, and the drafts accepted after
    every token that it costs, where that was measured."""

    cause: str
    measured: str
    costs: float | None = None

    @property
    def title(self) -> str:
        return CAUSES[self.cause].title

    @property
    def remedy(self) -> str:
        return CAUSES[self.cause].remedy


@dataclass(frozen=True)
class NotChecked:
    """A check that could not be made: what it asks, and why not."""

    check: str
    reason: str


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each cause, those first that may bring the others about. What several checks measured of the same
    cause is put together."""
    by_cause: dict[str, list[Finding]] = {}
    for finding in findings:
        by_cause.setdefault(finding.cause, []).append(finding)
    merged = []
    for cause in sorted(by_cause, key=_ORDER.__getitem__):
        same = by_cause[cause]
        costs = [each.costs for each in same if each.costs is not None]
        measured = " ".join(dict.fromkeys(each.measured for each in same))
        merged.append(Finding(cause, measured, max(costs, default=None)))
    return merged
