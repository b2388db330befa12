"""Medusa heads that others trained, in the files of Medusa's own repository, as ours.

Such a file says neither its target nor, reliably, how many heads it has: these are counted. Knows nothing of our own
artifacts.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from eagle_train.artifacts.foreign_formats import NotRead
from eagle_train.artifacts.tensors import load_tensors, same_weight
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


def medusa_tensors(directory: Path, place: str) -> dict[str, torch.Tensor]:
    """The tensors of the directory, by the names of Medusa's repository."""
    with foreign(f"{place}: its weights cannot be read"):
        if (directory / HEADS_FILE).is_file():
            tensors = tensors_of(directory / HEADS_FILE)
        else:
            tensors = torch.load(directory / _PICKLE, map_location="cpu", weights_only=True)
    return {_PREFIX.sub("", name): tensor for name, tensor in tensors.items()}


def load_medusa(directory: Path, target: Target, place: str) -> MedusaDraft:
    """The draft in fp32, with LM heads of its own unless all of them are the target's. Raises UserError for other
    tensors."""
    tensors = medusa_tensors(directory, place)
    blocks = [(int(found[1]), int(found[2])) for name in tensors if (found := BLOCK.match(name))]
    check(bool(blocks), f"{place}: has no 0.0.linear.weight, so these are no Medusa heads")
    _check_sizes(tensors, target, place)
    own = target.lm_head.weight.detach().cpu() * target.lm_head.scale
    is_targets = all(same_weight(tensor, own) for name, tensor in tensors.items() if LM_HEAD.match(name))
    config = MedusaConfig.from_target(
        target.config,
        heads=1 + max(head for head, _ in blocks),
        num_layers=1 + max(block for _, block in blocks),
        own_head=not is_targets,
    )
    draft = MedusaDraft(config)
    load_tensors(draft, LAYOUTS["trtllm"].ours(config, tensors), place)
    return draft


def _check_sizes(tensors: Mapping[str, torch.Tensor], target: Target, place: str) -> None:
    """Raise NotRead for heads of another hidden size or vocabulary than the target's; a head that differs from the
    others is no such."""
    wanted = {
        "hidden_size": (target.identity.hidden_size, BLOCK, -1),
        "vocab_size": (target.identity.vocab_size, LM_HEAD, 0),
    }
    for name, (own, pattern, side) in wanted.items():
        found = {tensor.shape[side] for each, tensor in tensors.items() if tensor.ndim == 2 and pattern.match(each)}
        same = len(found) != 1 or own in found
        check(same, f"{place}: {name} is {min(found, default=own)}, and {own} in target {target.name}", NotRead)
