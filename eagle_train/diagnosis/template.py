"""Whether prompts are rendered otherwise than in training: each switch of the chat template is tried both ways.

Thinking on or off is the usual one. The target answers the prompts of each rendering anew, as its answers differ too.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eagle_train.corpus.template import ChatTemplate
from eagle_train.diagnosis.causes import Finding, NotChecked
from eagle_train.diagnosis.learning import Learnt
from eagle_train.diagnosis.measure import Measured, unexplained
from eagle_train.diagnosis.texts import Question
from eagle_train.errors import UserError, typed
from eagle_train.inference import Requests

LEAST_GAIN = 0.1
"""How much more often the first token must be right under another rendering, where the target is as sure. A draft that
has learnt from one rendering is by some percent better there; this says that it has hardly seen the other."""
_MOST = 4  # renderings that are tried: each has to be answered
_LIKELY = ("think", "reason")  # in the names of the switches that differ most often

Examine = Callable[[Sequence[list[int]]], Measured]
"""What the draft is worth on the target's own answers to these prompts."""


def other_templates(
    requests: Requests,
    questions: Sequence[Question],
    own: Measured,
    training: Mapping[str, Any],
    examine: Examine,
    seed: int,
) -> Learnt:
    """The finding of the rendering under which the draft is best, if it is much better. `training`: what the artifact
    says of its data."""
    found, figures, silent = [], dict[str, Any](), list[NotChecked]()
    for kwargs, prompts in itertools.islice(_renderings(requests, questions, training), _MOST):
        said = ", ".join(f"{name}={typed(value)}" for name, value in kwargs.items())
        try:
            other = examine(prompts)
        except UserError as error:  # hardly anything is answered there; the other checks stand
            silent.append(NotChecked(f"prompts rendered with {said}", str(error)))
            continue
        gain = unexplained(other, own, seed)
        figures[said] = {"agreement": other.agreement, "gain": None if gain is None else gain.mean}
        if gain is not None and gain.low > LEAST_GAIN:
            found.append((gain.mean, said, other, gain))
    if not figures and not silent:
        reason = "the template reads no variable that changes these prompts"
        return Learnt([], [NotChecked("thinking on or off", reason)], {})
    if not found:
        return Learnt([], silent, {"templates": figures})
    _, said, other, gain = max(found, key=lambda each: each[0])
    told = (
        f"Rendered with {said}, the first token is right at {other.agreement:.1%} of the slots in place of "
        f"{own.agreement:.1%} (99 % interval of the gain: {gain.low:.2f} to {gain.high:.2f})."
    )
    return Learnt([Finding("template", told, other.tokens - own.tokens)], silent, {"templates": figures})


def _renderings(
    requests: Requests, questions: Sequence[Question], training: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[list[int]]]]:
    """Values of the template's variables under which the prompts are others, first those that the artifact names."""
    template, now = requests.template, [question.prompt for question in questions]
    trained = dict((training.get("data") or {}).get("template_kwargs") or {})
    tried = [trained] if trained else []
    ordered = sorted(template.switches, key=lambda name: (not any(word in name for word in _LIKELY), name))
    tried += [{name: value} for name in ordered for value in (True, False)]
    seen = [now]
    for kwargs in tried:
        try:
            other = ChatTemplate(requests.target.tokenizer, template.kwargs | kwargs)
            prompts = [other.prompt_tokens(question.messages) for question in questions]
        except UserError:  # no switch: it is set for each rendering, or the template uses it in another way
            continue
        if prompts not in seen:
            seen.append(prompts)
            yield kwargs, prompts
