"""What each serving engine loads, for every kind of draft: its kind says it. Knows nothing of files or of rounding."""

from typing import Any

import torch

from eagle_train.drafts import DraftConfig
from eagle_train.drafts.layouts import Layout, Shapes, Tensors
from eagle_train.errors import UserError, check
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


def layout_of(layout: str, draft: DraftConfig) -> Layout | None:
    """The layout of this name for a draft; None for our own engine, whose tensors have our names."""
    return draft.layouts.get(layout)


def to_layout(
    layout: str, draft: DraftConfig, tensors: Tensors, embedding: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Our tensors with the names of the engine's file. `embedding`: the target's [V, H], which some files repeat."""
    found = layout_of(layout, draft)
    return dict(tensors) if found is None else found.tensors(draft, tensors, embedding)


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
        raise UserError(f"layout={layout}: is for no draft of draft={draft.kind}; use one of {own}")
    reason = found.refusal(draft, quant)
    check(reason is None, f"layout={layout}: {NAMES[layout]} {reason}; use layout=native")


def expected_shapes(layout: str, draft: DraftConfig, target: Identity) -> Shapes:
    """Name and shape of every tensor that a serving engine loads for a draft, from the config alone."""
    found = layout_of(layout, draft)
    assert found is not None, "of a serving engine"
    return found.shapes(draft, target)
