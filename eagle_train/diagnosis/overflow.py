"""Whether the draft's numbers fit the type that it is served in. Knows nothing of files."""

from typing import Any

import torch

from eagle_train.diagnosis.causes import Finding, NotChecked
from eagle_train.diagnosis.compare import calls
from eagle_train.diagnosis.learning import Learnt
from eagle_train.diagnosis.texts import Part
from eagle_train.drafts import Draft
from eagle_train.models.target import Target


def overflow(target: Target, draft: Draft, part: Part, dtype: str | None) -> Learnt:
    """The largest number that a module of the draft gives in fp32, against what `dtype` holds. None: it is not known in
    which type the draft is served, and of the usual ones float16 alone holds too little."""
    largest, where = 0.0, ""
    for call in calls(target, draft, part):
        if isinstance(call.output, torch.Tensor) and call.output.is_floating_point():
            found = call.output.abs().max().item()
            if not found <= largest:  # NaN too
                largest, where = found, call.name
    most = torch.finfo(getattr(torch, dtype or "float16")).max
    figures: dict[str, Any] = {"largest_activation": largest}
    if largest <= most:
        return Learnt([], [], figures)
    if dtype is None:
        reason = f"{where} gives {largest:.3g}, which float16 does not hold; give serving_dtype"
        return Learnt([], [NotChecked("overflow", reason)], figures)
    return Learnt(
        [Finding("precision", f"{where} gives {largest:.3g}, and {dtype} holds up to {most:.3g}.")], [], figures
    )
