"""How often a draft's fp32 weights are cast to bf16, whoever casts them."""

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle_train.training.trainer import Trainer
from tests.support.trainers import started


class Casts(TorchDispatchMode):
    """Counts, by the memory they lie in, the casts of these weights: by conversion or by a copy into bf16."""

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.known, self.counts = {memory(weight) for weight in weights}, Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("_to_copy", "copy_", "_foreach_copy_"):
            to, of = (result, args[0]) if name == "_to_copy" else args[:2]
            for low, wide in zip(tree_leaves(to), tree_leaves(of), strict=True):
                if (low.dtype, wide.dtype) == (torch.bfloat16, torch.float32) and memory(wide) in self.known:
                    self.counts[memory(wide)] += 1
        return result


def memory(tensor: torch.Tensor) -> int:
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.untyped_storage().data_ptr()


def casts_of_a_step(trainer: Trainer) -> set[int]:
    """How often each weight that is cast at all is cast in the trainer's second step."""
    started(trainer).train_step()
    with Casts([weight.detach() for weight in trainer.draft.parameters()]) as casts:
        trainer.train_step()
    return set(casts.counts.values())
