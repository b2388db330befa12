"""What each serving engine loads, for every kind of draft: its kind says it. Knows nothing of files or of rounding."""

import re
from dataclasses import fields
from typing import Any

import torch

from eagle_train.drafts import DraftConfig
from eagle_train.drafts.layouts import WEIGHTS, Layout, Shapes, Tensors, first_of
from eagle_train.errors import UserError, check, typed
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.target import Identity

NAMES = {
    "native": "our own engine",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "speculators": "the format of speculators",
}
LAYOUTS = tuple(NAMES)
_WHOSE = {"trtllm": "is of TensorRT-LLM's TensorRT backend, and"}  # its PyTorch backend reads other directories
_TARGET = {"target": "the target"}  # whose own module it takes the place of


def layout_of(layout: str, draft: DraftConfig) -> Layout | None:
    """The layout of this name for a draft; None for our own engine, whose tensors have our names."""
    return draft.layouts.get(layout)


def to_layout(
    layout: str, draft: DraftConfig, tensors: Tensors, repeated: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Our tensors with the names of the engine's file. `repeated` [V, H]: of the target's, see `Layout.repeats`."""
    found = layout_of(layout, draft)
    return dict(tensors) if found is None else found.tensors(draft, tensors, repeated)


def weights_file(layout: str, draft: DraftConfig) -> str:
    """The name of the file of a draft's tensors."""
    found = layout_of(layout, draft)
    return WEIGHTS if found is None else found.weights


def from_layout(layout: str, draft: DraftConfig, tensors: Tensors) -> dict[str, torch.Tensor]:
    """The inverse of `to_layout`. Tensors that `to_layout` would not write are kept, for the reader to refuse."""
    found = layout_of(layout, draft)
    return dict(tensors) if found is None else found.ours(draft, tensors)


def layout_config(layout: str, draft: DraftConfig, quant: Quant, dtype: str, target: Identity) -> dict[str, Any]:
    """The engine's config.json; empty for our own engine. Raises as `check_runs` does."""
    check_runs(layout, draft, quant)
    found = layout_of(layout, draft)
    return {} if found is None else found.config(draft, quant, dtype, target)


def check_runs(layout: str, draft: DraftConfig, quant: Quant) -> None:
    """Raise UserError, with the reason, for a draft that the engine refuses or silently computes differently."""
    if layout == "native":
        return
    found = layout_of(layout, draft)
    own = ", ".join(["native", *draft.layouts])
    if found is None:
        whose = _WHOSE.get(layout, "is")
        raise UserError(f"layout={layout}: {whose} for no draft of draft={draft.kind}; use one of {own}")
    reason = found.refusal(draft, quant)
    plain = "quant=none or " if found.refusal(draft, Quant()) is None else ""
    check(reason is None, f"layout={layout}: {NAMES[layout]} {reason}; use {plain}layout=native")


def unserved(draft: DraftConfig) -> list[str]:
    """What serving engines cannot run of a draft with this config, not quantised, and what to give for them: a line for
    each reason. For who is about to train it."""
    by_reason: dict[str, list[str]] = {}
    for name, layout in draft.layouts.items():
        reason = layout.refusal(draft, Quant())
        if reason is None and draft.first_slot == 0:
            reason = "has no slot for the first token, and accepts fewer tokens than our engine (draft.first_token)"
        if reason is not None:
            by_reason.setdefault(reason, []).append(name)
    with torch.device("meta"):
        own = draft.module().in_target(1)
    if own is not None and (reason := not_in_target(draft)) is not None:
        by_reason.setdefault(reason, []).append("target")
    return [_told(names, reason, draft) for reason, names in by_reason.items()]


def not_in_target(draft: DraftConfig) -> str | None:
    """What keeps a draft out of its target's own checkpoint, in words that follow the target's name; None: nothing."""
    return first_of(
        {
            "has no window in its own module (draft.window)": draft.window is not None,
            "has no sinks in its own module (draft.sink)": draft.sink,
            "proposes from its whole vocabulary by its own module (draft.vocab_size)": draft.vocab_size is not None,
            "has no slot for the first token, and accepts fewer tokens than our engine (draft.first_token)": (
                draft.first_slot == 0
            ),
        }
    )


def _told(names: list[str], reason: str, draft: DraftConfig) -> str:
    who = (NAMES | _TARGET)[names[0]] if len(names) == 1 else "each"
    own = {each.name: each.default for each in fields(draft)} | {"first_token": "skip"}
    named = [name for name in re.findall(r"draft\.(\w+)", reason) if getattr(draft, name) != own[name]]
    instead = ", ".join(f"draft.{name}={typed(own[name])}" for name in dict.fromkeys(named))
    return f"layout={','.join(names)}: {who} {reason}" + (f"; for it, train with {instead}" if instead else "")


def expected_shapes(layout: str, draft: DraftConfig, target: Identity) -> Shapes:
    """Name and shape of every tensor that a serving engine loads for a draft, from the config alone."""
    found = layout_of(layout, draft)
    assert found is not None, "of a serving engine"
    return found.shapes(draft, target)
