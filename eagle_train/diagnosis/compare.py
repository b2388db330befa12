"""The draft as it is served against the draft as it was trained: the first module, token and position where they part.

Each module of the served draft is given what the same module of the trained one reads, so that a difference is its own
and not one that came before. Knows nothing of files or engines.

Shapes: T tokens of a part.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from eagle_train.diagnosis.causes import Finding
from eagle_train.diagnosis.reading import plain
from eagle_train.diagnosis.texts import Part
from eagle_train.drafts import Draft, Head
from eagle_train.errors import shown
from eagle_train.models.layers import Rotary
from eagle_train.models.target import Target

# The largest relative difference of a module's output that a precision explains: rounding a weight to bf16 changes it
# by 2^-9, and outputs by less, unless they cancel; FP8 and INT4 have 4 % and 10 % on normally distributed weights.
_EXPLAINED = {"none": 0.02, "fp8": 0.12, "int4": 0.35}
_ROUNDED = 0.9  # of a weight that was rounded to a few values; of two that have nothing in common it is 1.4
_HEAD_ROWS = 1024  # slots whose logits are compared
_BY_FIELD = {
    "rope_parameters": "rope",
    "layers": "layer",
    "vocabulary": "vocabulary",
    "mask_token": "embedding",
    "num_heads": "tensor",  # by which the same matrices are divided
    "window": "context",
}
_NORMS = ("norms", "norm_output", "norm_before_residual", "norm_before_fc", "fc_norm")


@dataclass(frozen=True, eq=False)
class Call:
    """What a module was given and gave, in the order of the forward."""

    name: str
    given: tuple[Any, ...]
    output: Any


@torch.no_grad()
def compared(target: Target, trained: Draft, served: Draft, part: Part) -> list[Finding]:
    """What differs between the two, the first module of them; nothing where they are the same draft.

    Rounding is expected of modules of the served draft that are quantised."""
    found = list(_fields(trained, served))
    shapes = [{name: each.shape for name, each in draft.state_dict().items()} for draft in (trained, plain(served))]
    if shapes[0] != shapes[1]:
        names = sorted(
            name for name in shapes[0].keys() | shapes[1].keys() if shapes[0].get(name) != shapes[1].get(name)
        )
        return [*found, Finding("tensor", f"{names[0]} is in one of the two drafts alone, or has another shape.")]
    first = next(_modules(target, trained, served, part), None) or next(_parameters(trained, served), None)
    return found if first is None else [*found, first]


def _fields(trained: Draft, served: Draft) -> Iterator[Finding]:
    """Conventions that are in the config."""
    right, given = asdict(trained.config), asdict(served.config)
    for name in (*_BY_FIELD, *_NORMS):
        if name == "rope_parameters" or name not in right or right[name] == given.get(name):
            continue  # rotary settings are compared by their angles: there are several ways to say them
        cause = _BY_FIELD.get(name, "norm")
        yield Finding(
            cause, f"The engine reads {name} {shown(given.get(name))}; it was trained with {shown(right[name])}."
        )


def _modules(target: Target, trained: Draft, served: Draft, part: Part) -> Iterator[Finding]:
    for call in calls(target, trained, part):
        module, own = served.get_submodule(call.name), trained.get_submodule(call.name)
        if isinstance(own, Rotary):
            yield from _angles(call, module, own)
            continue
        scheme = getattr(module, "scheme", "none")
        found = module(*call.given)
        off = _relative(found, call.output)
        if off > _EXPLAINED[scheme]:
            yield _told(call, module, own, found, part, off, not trained.config.target_layers)


def calls(target: Target, draft: Draft, part: Part) -> list[Call]:
    """What the draft's modules without others in them, and its rotary positions, compute over a part in pass 1, of a
    chain of modules in a pass each; and its LM heads, where it has some, of the first `_HEAD_ROWS` slots."""
    found: list[Call] = []

    def note(name: str, given: tuple[Any, ...], output: Any) -> None:
        found.append(Call(name, tuple(each.clone() for each in given), output))

    leaves = {name: each for name, each in draft.named_modules() if next(each.children(), None) is None}
    hooks = [
        module.register_forward_hook(lambda _, given, output, name=name: note(name, given, output))
        for name, module in leaves.items()
        if not isinstance(module, nn.Identity)
    ]
    heads = max(1, draft.config.own_heads)
    states = draft.unrolled(draft, part.rows(), max(heads, draft.config.whole_passes))
    for level in range(heads):
        draft.logits(states[level][:, :_HEAD_ROWS], Head(draft, target.lm_head, level), level)
    for hook in hooks:
        hook.remove()
    return found


def _angles(call: Call, module: Any, own: Any) -> Iterator[Finding]:
    """Rotary positions: the first at which a pair of a head's numbers turns by another angle."""
    positions = call.given[0]
    found, right = module(positions), call.output
    turned, meant = (each[0].shape[-1] for each in (found, right))
    if turned != meant:  # another partial_rotary_factor, say
        yield Finding("rope", f"{turned} numbers of each head are turned, and {meant} were in training.")
        return
    off = torch.stack([(one - other).abs().amax(-1)[0, 0] for one, other in zip(found, right, strict=True)]).amax(0)
    wrong = (off > 1e-3).nonzero()
    if len(wrong):
        at = int(wrong[0])
        place = int(positions[0, at])
        slowest = [each.frequencies.view(torch.float32).abs().min().item() for each in (module, own)]
        said = f"First divergence at {call.name}, token {at}, position {place}"
        turns = f"the slowest angle is {slowest[0]:.3g} a position, and was {slowest[1]:.3g} in training"
        turns = f"cos and sin are off by up to {off.max():.2g}; {turns}"
        yield Finding("rope", f"{said}: {turns}.")


def _told(
    call: Call, module: Any, own: Any, found: torch.Tensor, part: Part, off: float, reads_embedding: bool
) -> Finding:
    """Which slot is the first, and what the weight looks like."""
    scheme = getattr(module, "scheme", "none")
    rows, right = found.flatten(0, -2), call.output.flatten(0, -2)
    each = (rows - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-30)
    at = min(int((each > _EXPLAINED[scheme]).long().argmax()), part.tokens.shape[1] - 1)  # behind it: mask slots
    position, token = int(part.positions[0, at]), int(part.tokens[0, at])
    where = f"First divergence at {call.name}, token {at} (id {token}), position {position}: {off:.0%} off"
    explained = f"where {'rounding' if scheme == 'none' else scheme} explains {_EXPLAINED[scheme]:.0%}"
    cause, looks = _looks(module, own, call.name, reads_embedding)
    return Finding(cause, f"{where}, {explained}{looks}.")


def _looks(module: Any, own: Any, name: str, reads_embedding: bool) -> tuple[str, str]:
    """The cause that a module's difference has by its name and its weight, and how the weight looks, in words."""
    cause = "norm" if "norm" in name else "tensor"
    if hasattr(module, "scheme"):
        return "precision", f"; its {module.scheme} codes and scales are not the weight's"
    found, right = getattr(module, "weight", None), getattr(own, "weight", None)
    if found is None or right is None:
        return cause, ""
    found, right = found.float(), right.float()
    if not found.any():
        return cause, "; the weight is zero"
    half = found.shape[-1] // 2
    if found.ndim == 2:
        if found.shape[0] == found.shape[1] and _relative(found.t(), right) < 0.02:
            return cause, "; the weight is transposed"
        if _relative(found.roll(half, 1), right) < 0.02:
            return cause, "; the halves of the weight's columns are swapped"
    if name.rpartition(".")[2] == "fc" and reads_embedding and _relative(found[:, half:], right[:, half:]) < 0.02:
        scale = _scale(found[:, :half], right[:, :half])
        how = f"multiplied by {scale:.3g}" if scale else "others"
        return "embedding", f"; the weight's columns for the embedding are {how}"
    if scale := _scale(found, right):
        return cause, f"; the weight is multiplied by {scale:.3g}"
    if found.ndim == 2 and _relative(found, right) < _ROUNDED:
        return "precision", f"; the weight is {_relative(found, right):.0%} off, as by coarse rounding"
    return cause, f"; the weight is {_relative(found, right):.0%} off"


def _scale(found: torch.Tensor, right: torch.Tensor) -> float | None:
    """What `right` is multiplied by in `found`; None where that is not all."""
    scale = ((found * right).sum() / (right * right).sum()).item()
    return scale if _relative(found, scale * right) < 0.02 else None


def _parameters(trained: Draft, served: Draft) -> Iterator[Finding]:
    """Those that no module without others in it holds: sinks, and what mask slots are fed."""
    own = dict(trained.named_parameters())
    for name, found in served.named_parameters():
        off = _relative(found, own[name]) if name in own and own[name].ndim == 1 else 0.0
        if off > _EXPLAINED["none"]:
            yield Finding("tensor", f"{name} is {off:.0%} off what was trained.")


def _relative(found: torch.Tensor, right: torch.Tensor) -> float:
    if found.shape != right.shape:
        return float("inf")
    return ((found - right).norm() / right.norm().clamp(min=1e-30)).item()
