"""What test_cost.py starts on several ranks: how much a draft that FSDP2 divides holds at the peak of a step."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eagle_train import distributed
from eagle_train.distributed import World
from eagle_train.drafts import EagleConfig, EagleDraft
from eagle_train.ops.attention import packed_attention
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.parallelize import prepare
from tests.support.tiny import tiny_model

WIDE = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "head_dim": 64}
TOKENS = 4  # so that next to nothing is held but the draft


class Held(TorchDispatchMode):
    """The most bytes of all tensors that are alive; FSDP2 empties and fills some in place."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.alive = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, result)):
            tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.alive.setdefault(storage._cdata, weakref.ref(storage, self.forget(storage._cdata)))
        there = [storage for storage in (reference() for reference in [*self.alive.values()]) if storage is not None]
        self.most = max(self.most, sum(storage.nbytes() for storage in there))
        return result

    def forget(self, name: int) -> Any:
        return lambda _: self.alive.pop(name, None)


def most_held(layers: int, micro_batches: int, world: World, **settings: Any) -> int:
    """In a rank's second step, of a draft that is divided as `parallel`'s `settings` say."""
    parallel = ParallelConfig("fsdp2", **settings)
    world = world.divided(1, parallel.draft_shard_size_of(world.size))
    with Held() as held:
        draft = EagleDraft(EagleConfig.from_target(tiny_model(**WIDE).config, num_layers=layers)).init_weights(0)
        backend = prepare(draft, OptimConfig(), parallel, world, torch.bfloat16)
        embeddings, hidden = torch.randn(2, 1, TOKENS, WIDE["hidden_size"]).bfloat16()
        positions, attend = torch.arange(TOKENS)[None], packed_attention([[TOKENS]])
        for _ in range(2):
            gc.collect()
            held.most = 0
            for number in range(micro_batches):
                backend.begin(last=number == micro_batches - 1)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    predicted = backend.draft(embeddings, hidden, positions, attend)
                backend.backward(predicted.float().square().mean())
            backend.clip()
            backend.step(1e-3)
    return held.most


def main(out: Path, cases: list[dict]) -> None:
    """`cases`: {"layers": 4, "micro_batches": 2} and the like."""
    world = distributed.start("cpu", shard_size=None, group=True)
    found = [most_held(**case, world=world) for case in cases]
    if world.is_main:
        out.write_text(json.dumps(found))
    distributed.leave()
