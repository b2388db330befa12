"""Whether prompts are rendered otherwise than in training: each switch of the chat template is tried both ways, and the
reasoning effort at each level.

Thinking on or off is the usual one. The target answers the prompts of each rendering anew, as its answers differ too.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eagle_train.corpus.template import ChatTemplate
from eagle_train.diagnosis.causes import Finding, NotChecked
from eagle_train.diagnosis.learning import Learnt
from eagle_train.diagnosis.measure import FEWEST, Measured, unexplained
from eagle_train.diagnosis.texts import Question
from eagle_train.errors import UserError, typed
from eagle_train.inference import Requests

LEAST_GAIN = 0.1
"""How much more often the first token must be right under another rendering, where the target is as sure. A draft that
has learnt from one rendering is by some percent better there; this says that it has hardly seen the other."""
_MOST = 4  # renderings that are tried: each has to be answered
_LIKELY = ("think", "reason")  # in the names of the switches that differ most often
_EFFORT, _EFFORTS = "effort", ("low", "medium", "high")  # in a variable's name, and its values
_CLOCKS = ("date", "time")  # in the names of variables that are no convention of a training

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
        if gain is None:
            reason = f"too few tokens, or tokens of fewer than {FEWEST} prompts, can be compared"
            silent.append(NotChecked(f"prompts rendered with {said}", reason))
        elif gain.low > LEAST_GAIN:
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
    trained = dict((training.get("data") or {}).get("template_kwargs") or {})
    names = sorted(requests.template.switches, key=lambda name: (not any(word in name for word in _LIKELY), name))
    first = [(trained, _prompts(requests, questions, trained))] if trained else []
    others = itertools.chain.from_iterable(_of_variable(requests, questions, name) for name in names)
    seen = [[question.prompt for question in questions]]
    for kwargs, prompts in itertools.chain(first, others):
        if prompts is not None and prompts not in seen:
            seen.append(prompts)
            yield kwargs, prompts


def _prompts(requests: Requests, questions: Sequence[Question], kwargs: dict[str, Any]) -> list[list[int]] | None:
    """The questions under these variables; None where the template refuses such a value."""
    try:
        own = requests.template
        other = ChatTemplate(requests.target.tokenizer, own.kwargs | kwargs, own.date)
        return [other.prompt_tokens(question.messages) for question in questions]
    except UserError:  # it is set for each rendering, or the template uses it in another way
        return None


def _of_variable(
    requests: Requests, questions: Sequence[Question], name: str
) -> list[tuple[dict[str, Any], list[list[int]] | None]]:
    """What is tried of a variable: the levels of an effort, and true and false of a switch. That is one where the two
    differ and neither is written into the prompts, as it would be in place of a name or a number. No dates."""
    if any(word in name.lower() for word in _CLOCKS):
        return []
    if _EFFORT in name.lower():
        return [({name: value}, _prompts(requests, questions, {name: value})) for value in _EFFORTS]
    on, off = (_prompts(requests, questions, {name: value}) for value in (True, False))
    now = [question.prompt for question in questions]
    decode = requests.target.tokenizer.decode

    def writes(prompts: list[list[int]], word: str) -> bool:
        counts = [sum(len(re.findall(rf"\b{word}\b", decode(each))) for each in given) for given in (prompts, now)]
        return counts[0] > counts[1]

    if on is None or off is None or on == off or writes(on, "True") or writes(off, "False"):
        return []
    return [({name: True}, on), ({name: False}, off)]
