"""Medusa heads that others trained, in the files of Medusa's own repository, as ours.

Such a file says neither its target nor, reliably, how many heads it has: these are counted. Knows nothing of our own
artifacts.
"""

import re
from pathlib import Path

import torch

from eagle_train.artifacts.tensors import load_tensors
from eagle_train.drafts import MedusaConfig, MedusaDraft
from eagle_train.drafts.medusa_layouts import BLOCK, HEADS_FILE, LAYOUTS, LM_HEAD
from eagle_train.errors import check, foreign
from eagle_train.models.target import Target
from eagle_train.ops.tensor_files import tensors_of

_PICKLE = "medusa_lm_head.pt"
_PREFIX = re.compile(r"^medusa_heads?\.")  # that whole models put before the names


def has_medusa_heads(directory: Path) -> bool:
    """Whether these are the files of Medusa heads."""
    return any((directory / name).is_file() for name in (HEADS_FILE, _PICKLE))


def load_medusa(directory: Path, target: Target) -> MedusaDraft:
    """The draft in fp32, with LM heads of its own unless all of them are the target's. Raises UserError for other
    tensors."""
    place = f"checkpoint={directory}"
    with foreign(f"{place}: its weights cannot be read"):
        if (directory / HEADS_FILE).is_file():
            tensors = tensors_of(directory / HEADS_FILE)
        else:
            tensors = torch.load(directory / _PICKLE, map_location="cpu", weights_only=True)
    tensors = {_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}
    blocks = [(int(found[1]), int(found[2])) for name in tensors if (found := BLOCK.match(name))]
    check(bool(blocks), f"{place}: has no 0.0.linear.weight, so these are no Medusa heads")
    own = target.lm_head.weight.detach().cpu() * target.lm_head.scale
    is_targets = all(_same(tensor, own) for name, tensor in tensors.items() if LM_HEAD.match(name))
    config = MedusaConfig.from_target(
        target.config,
        heads=1 + max(head for head, _ in blocks),
        num_layers=1 + max(block for _, block in blocks),
        own_head=not is_targets,
    )
    draft = MedusaDraft(config)
    load_tensors(draft, LAYOUTS["trtllm"].ours(config, tensors), place)
    return draft


def _same(found: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether a tensor is the target's, in the precision of either."""
    equal = (torch.equal(found.to(dtype), own.to(dtype)) for dtype in (found.dtype, own.dtype))
    return found.shape == own.shape and any(equal)
