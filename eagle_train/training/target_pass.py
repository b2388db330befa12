"""What a step needs of the frozen target: a batch on its device, its hidden states, its precision. DESIGN section 3.4.

Shapes: B rows, T tokens of a packed row, H hidden.
"""

import dataclasses
import warnings

import torch

from eagle_train.corpus.stream import TENSORS, Batch
from eagle_train.errors import OptionError
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`."""
    tensors = {name: getattr(batch, name).to(device, non_blocking=True) for name in TENSORS}
    return dataclasses.replace(batch, **tensors)


def hidden_states(target: Target, batch: Batch, compiled: bool = False) -> torch.Tensor:
    """The target's hidden states [B, T, H] after its final norm, in its dtype; each document attends to itself.

    `compiled`: by torch.compile, of a target that is whole on this rank.
    """
    forward = target.compiled if compiled else target.own_hidden_states
    return forward(batch.tokens, batch.positions, packed_attention(batch.lengths))


def can_compile(target: Target, rows: int, tokens: int, wanted: bool | None) -> bool:
    """Whether the target's forward of [rows, tokens] is compiled now: as `wanted`, or, if that is None, on a GPU.

    Where torch.compile fails None warns and goes on without; True raises OptionError.
    """
    if not wanted and (wanted is not None or target.device.type != "cuda"):
        return False
    zeros = torch.zeros(rows, tokens, dtype=torch.long, device=target.device)
    try:
        target.compiled.prepare(zeros, zeros)
    except OptionError as error:
        if wanted:
            raise
        warnings.warn(f"{error}; the run goes on without", stacklevel=2)
        return False
    return True


def autocast(target: Target) -> torch.autocast:
    """The draft's weights are fp32; under this it computes in the target's dtype."""
    low = target.dtype != torch.float32
    return torch.autocast(target.device.type, dtype=target.dtype if low else None, enabled=low)
