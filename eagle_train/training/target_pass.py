"""What a step needs of the frozen target: a batch on its device, its hidden states, its precision. DESIGN section 3.4.

Shapes: B rows, T tokens of a packed row, H hidden.
"""

import dataclasses

import torch

from eagle_train.corpus.stream import TENSORS, Batch
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on `device`."""
    tensors = {name: getattr(batch, name).to(device, non_blocking=True) for name in TENSORS}
    return dataclasses.replace(batch, **tensors)


def hidden_states(target: Target, batch: Batch) -> torch.Tensor:
    """The target's hidden states [B, T, H] after its final norm, in its dtype; each document attends to itself."""
    return target.own_hidden_states(batch.tokens, batch.positions, packed_attention(batch.lengths))


def autocast(target: Target) -> torch.autocast:
    """The draft's weights are fp32; under this it computes in the target's dtype."""
    low = target.dtype != torch.float32
    return torch.autocast(target.device.type, dtype=target.dtype if low else None, enabled=low)
