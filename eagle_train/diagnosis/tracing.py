"""Where our engine and the training graph part: the first token and stage of one answer, from its beginning on.

Both run the same module with an `attend` of their own. What the module is given and what each layer asks `attend` for
is recorded in both, and compared token by token. Knows nothing of causes but the names.

Shapes: T tokens of a call.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle_train.diagnosis.causes import Finding
from eagle_train.diagnosis.replay import engine_for
from eagle_train.diagnosis.texts import Part, Text
from eagle_train.drafts import Draft
from eagle_train.inference import Output, SamplingParams
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.models.target import Target
from eagle_train.ops.rule import Attend, Rule

# The largest relative difference that rounding explains: sums in another order, in fp32 and in sixteen bits.
_EXPLAINED = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
_POSITION, _EMBEDDING, _HIDDEN = "position", "token embedding", "hidden state"


@dataclass
class Recorded:
    """A forward of the draft: by stage what it computed at each of its tokens, [T, ...]. `end`: of its tokens the last
    one that is read, None where all are; `module`: which one of a chain's, 0 the first."""

    stages: dict[str, torch.Tensor] = field(default_factory=dict)
    end: int | None = None
    module: int = 0

    @property
    def count(self) -> int:
        """Tokens that are no padding."""
        whole = len(next(iter(self.stages.values())))
        return whole if self.end is None else self.end + 1


@contextmanager
def recording(draft: Draft) -> Iterator[list[Recorded]]:
    """The forwards of a draft with one row meanwhile, in their order."""
    calls: list[Recorded] = []

    def before(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        embeddings, hidden, positions, attend, wanted = (*given, *[None] * (5 - len(given)))[:5]
        calls.append(call := Recorded(module=named.get("module", 0)))
        if positions is not None:
            call.stages[_POSITION] = positions[0, :, None].double()
            call.stages[_EMBEDDING] = embeddings[0]
        fuses = named.get("fuses", False)
        fused = draft.fuse(torch.cat((hidden[..., : draft.config.hidden_size], hidden), -1)) if fuses else hidden
        call.stages[_HIDDEN] = fused[0]
        if wanted is not None and wanted.numel():
            call.end = int(wanted[0, 0])
        if attend is None:
            return given, named
        return (*given[:3], _noting(attend, call), *given[4:]), named

    hook = draft.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def _noting(attend: Attend, call: Recorded) -> Attend:
    """`attend` that notes what it is asked."""

    def wrapped(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        out = attend(layer, q, k, v, rule)
        for name, each in (("queries", q), ("keys", k), ("values", v), ("attention", out)):
            call.stages[f"layer {layer}, {name}"] = each[0].transpose(0, 1).flatten(1)
        return out

    return wrapped


@torch.no_grad()
def parting(target: Target, draft: Draft, part: Part, text: Text, said: str) -> Finding:
    """The first stage of the first token at which engine and training graph differ on an answer. `said`: what differs
    in the rounds. `part`: of this text alone."""
    with recording(draft) as calls:
        draft.unrolled(draft, part.rows(), draft.config.whole_passes)
    by_module = {call.module: call for call in calls}
    bound = _EXPLAINED[target.dtype]
    for index, call, place in _slots(target, draft, text):
        right = by_module[call.module]
        if not max(1, draft.config.first_slot_of(call.module)) <= index < right.count:
            continue
        for stage in right.stages:
            own, found = right.stages[stage][index].double(), call.stages[stage][place].double()
            if (own - found).norm() > bound * own.norm().clamp(min=1e-30):
                return _told(stage, call.module, text, index, found, own, said)
    return _of_chain(target, draft, text, said)


def _slots(target: Target, draft: Draft, text: Text) -> Iterator[tuple[int, Recorded, int]]:
    """The slots of committed tokens that our engine computes, with chains of one token: the token's place in the text,
    the forward, and the place in that. A draft without a cache has one for each round, that of the pending token. Else
    the prompt is read, and then what each round committed, by one module after the other where there are several."""
    calls, output = _served(target, draft, text, 1)
    if draft.config.at_once:
        pending = len(text.prompt)
        for call, committed in zip(calls, output.rounds, strict=False):
            yield pending, call, call.count - 1
            pending += committed
        return
    modules, counts = draft.config.whole_passes, [len(text.prompt), 1, *output.rounds]
    for number, call in enumerate(calls):
        first, count = sum(counts[: number // modules]), counts[number // modules]
        for place in range(count):
            yield first + place, call, place


def _told(
    stage: str, module: int, text: Text, index: int, found: torch.Tensor, own: torch.Tensor, said: str
) -> Finding:
    off = ((found - own).norm() / own.norm().clamp(min=1e-30)).item()
    inside = f"module {module + 1}, " if module else ""
    where = f"{said} First divergence at token {index} (id {text.tokens[index]}), {inside}{stage}: "
    if stage == _POSITION:
        return Finding("positions", f"{where}the engine has position {int(found)}, training {int(own)}.")
    turned = abs((found.norm() / own.norm().clamp(min=1e-30)).item() - 1) < 1e-3
    is_turned = turned and stage.startswith(f"layer {module},") and stage.endswith(("queries", "keys"))
    of_what_is_fed = {_EMBEDDING: "embedding", _HIDDEN: "engine" if module else "layer"}
    cause = "rope" if is_turned else of_what_is_fed.get(stage, "engine")
    return Finding(cause, f"{where}{off:.0%} off{', turned by another angle' if is_turned else ''}.")


def _of_chain(target: Target, draft: Draft, text: Text, said: str) -> Finding:
    """Of a draft whose first forward of each round is right: the positions of the second token of its chains."""
    equal = f"{said} The forward over committed tokens is the same in both"
    if draft.config.at_once or draft.config.in_one_pass or draft.config.whole_passes > 1:
        return Finding("engine", f"{equal}; what is proposed from it is not.")
    (calls, _), index = _served(target, draft, text, 2), 0
    while calls and index < len(text.prompt):
        index += calls.pop(0).count
    for aligned, chained in zip(calls[::2], calls[1::2], strict=False):  # a round is two forwards
        index += aligned.count
        position = int(chained.stages[_POSITION][0])
        if position != index:
            told = f"the second token of the chain after token {index - 1} is given position {position}, not {index}"
            return Finding("positions", f"{equal}. First divergence: {told}.")
    return Finding("engine", f"{equal}; chains differ from depth 2 on.")


def _served(target: Target, draft: Draft, text: Text, depth: int) -> tuple[list[Recorded], Output]:
    """The forwards of our engine while it answers one prompt, with chains of this depth, and the answer."""
    drafter = drafter_of(copy.deepcopy(draft), target)
    with recording(drafter.draft) as calls:
        engine = engine_for([text.prompt], len(text.answer), target, drafter, depth, 1)
        (output,) = engine.generate([text.prompt], SamplingParams(0.0, max_tokens=len(text.answer)))
    return calls, output
