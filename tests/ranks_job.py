"""What test_ranks.py starts on several ranks: one run after another, each with its own backend.

torchrun --nproc-per-node 2 tests/ranks_job.py DATA '[{"out": ..., "parallel": {...}, "train": {...}}, ...]'
"""

import json
import sys
from pathlib import Path

import torch
from test_trainer import a_target, make_trainer, run
from tiny import random_tokens
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

from eagle_train import distributed
from eagle_train.config import UserError
from eagle_train.distributed import World
from eagle_train.models.target import TargetConfig, load_target
from eagle_train.ops.attention import packed_attention
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.metrics import NoTracker
from eagle_train.training.trainer import Trainer


def one_run(data: Path, case: dict, world: World) -> None:
    parallel = ParallelConfig(**case["parallel"])
    if "weights" in case:  # divided
        target = load_target(TargetConfig(case["weights"]), "cpu", parallel.target, world)
    else:
        target = a_target(dtype=getattr(torch, case.get("dtype", "float32")))
    trainer = make_trainer(Path(case["out"]), data, parallel=parallel, target=target, world=world, **case["train"])
    leave_out(trainer, case.get("left_out", []))
    resumed = trainer.resume()
    if world.is_main:
        run(trainer, resumed)
    else:
        trainer.train(NoTracker(trainer.directory, {}))


def leave_out(trainer: Trainer, steps: list[int]) -> None:
    """Let the trainer skip these steps, as if their gradients were unsound."""
    trainer.is_sound = lambda norm: trainer.step not in steps


def hidden_states(case: dict, world: World) -> None:
    """Write what a divided target makes of this rank's row of two documents, or why it is refused."""
    try:
        target = load_target(TargetConfig(case["target"]), "cpu", case["placement"], world)
    except UserError as error:
        return torch.save({"refused": str(error)}, f"{case['out']}-{world.rank}")
    tokens, positions = a_row(world.rank)
    with FlopCounterMode(display=False) as counter:
        hidden = target.own_hidden_states(tokens, positions, packed_attention([[9, 11]]))
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in target.model.parameters()]
    found = {"hidden": hidden, "fingerprint": target.identity.fingerprint, "own": sum(part.numel() for part in parts)}
    found["flops"] = counter.get_total_flops()
    torch.save(found, f"{case['out']}-{world.rank}")


def a_row(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions [1, 20] of two documents."""
    one, other = random_tokens(9, 11, seed=rank)
    return torch.tensor([one + other]), torch.cat((torch.arange(9), torch.arange(11)))[None]


if __name__ == "__main__":
    cases = json.loads(sys.argv[2])
    world = distributed.start("cpu", share=cases[0].get("share"), group=True)
    for case in cases:
        if "target" in case:
            hidden_states(case, world)
        else:
            one_run(Path(sys.argv[1]), case, world)
    distributed.leave()
