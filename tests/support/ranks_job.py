"""What test_ranks.py starts on several ranks: one run after another, each with its own backend."""

import contextlib
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.flop_counter import FlopCounterMode

from eagle_train import distributed
from eagle_train.distributed import World
from eagle_train.errors import UserError
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.weights import fingerprint, sample_of
from eagle_train.training.assembly import divided
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.checkpoint.format import RankTensors
from eagle_train.training.metrics import NoTracker
from eagle_train.training.target_pass import target_states as states_of
from eagle_train.training.trainer import Interrupted, Trainer
from tests.support.casts import casts_of_a_step
from tests.support.tiny import random_tokens
from tests.support.trainers import a_target, make_trainer, run_training


def one_run(data: Path, case: dict, world: World) -> None:
    parallel = ParallelConfig(**case["parallel"])
    if case.get("chosen"):
        parallel, world = divided(parallel, world, "cpu", *[None] * 5, row_tokens=0)
        assert (parallel.draft_shard_size, parallel.reshard_after_forward) == (2, False)
        assert world.draft_shard_mesh.shape == (2, 2)
    world = world.divided(world.shard_size, parallel.draft_shard_size_of(world.size))
    if "weights" in case:  # divided
        target = load_target(TargetConfig(case["weights"]), "cpu", parallel.target, world)
    else:
        target = a_target(dtype=getattr(torch, case.get("dtype", "float32")))
    trainer = make_trainer(Path(case["out"]), data, parallel=parallel, target=target, world=world, **case["train"])
    if "begins" in case:
        begins = {name: tensor.clone() for name, tensor in trainer.backend.state()[0].items()}
        torch.save(begins, f"{case['begins']}-begins-{world.rank}")
    leave_out(trainer, case.get("left_out", []))
    drop_parts(trainer, case.get("dropped", []))
    spoil(trainer, case.get("spoilt", []))
    stop_at(trainer, case.get("told"))
    if "casts" in case:
        return torch.save(casts_of_a_step(trainer), f"{case['out']}-{world.rank}")
    resumed = trainer.resume()
    with contextlib.suppress(Interrupted):
        if world.is_main:
            run_training(trainer, resumed)
        else:
            trainer.train(NoTracker(trainer.directory, {}))
    if "gathered" in case:
        torch.save(most_gathered(trainer), f"{case['gathered']}-{world.rank}")


def leave_out(trainer: Trainer, steps: list[int]) -> None:
    """Let the trainer skip these steps too, as if their gradients were unsound."""
    is_sound = trainer._is_sound
    trainer._is_sound = lambda norm: is_sound(norm) and trainer.state.step + 1 not in steps


def drop_parts(trainer: Trainer, steps: list[int]) -> None:
    """Let these steps begin with a micro-batch, of a later step, whose gradients are dropped."""

    def train_step() -> dict:
        if trainer.state.step + 1 in steps:
            batch = trainer.lookahead.upcoming(-1)[0]
            states = states_of(trainer.target, batch, trainer.draft.config.target_layers)
            trainer.backend.begin(last=False)
            trainer.forward_backward_step(batch, states, 1.0)
            trainer._drop_step(batch, states)
        return Trainer.train_step(trainer)

    trainer.train_step = train_step


def spoil(trainer: Trainer, steps: list[int]) -> None:
    """Let the gradients of these steps be no numbers."""
    backward = trainer.backend.backward
    trainer.backend.backward = lambda loss: backward(loss * math.nan if trainer.state.step + 1 in steps else loss)


def stop_at(trainer: Trainer, told: list[int] | None) -> None:
    """Tell one of the ranks to stop: [rank, steps that were done, micro-batch that was the last]."""
    if told is not None and told[0] == trainer.world.rank:
        trainer.stop_asked = lambda: [trainer.state.step, trainer.micro_batch] == told[1:]


def most_gathered(trainer: Trainer) -> dict[str, int]:
    """How many of the tensors that DeepSpeed gathers for a checkpoint are there at once, and what is kept of them."""
    tools, alive, most = trainer.backend._tools, weakref.WeakSet(), 0

    def counting(gather: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*arguments: Any) -> torch.Tensor:
            nonlocal most
            alive.add(tensor := gather(*arguments))
            most = max(most, len(alive))
            return tensor

        return counted

    names = ("safe_get_full_fp32_param", "safe_get_full_optimizer_state")
    trainer.backend._tools = SimpleNamespace(**{name: counting(getattr(tools, name)) for name in names})
    parts = RankTensors.copied(*trainer.backend.state(), trainer.world)
    trainer.backend._tools = tools
    return {"most": most, "draft": len(parts.draft), "optimizer": len(parts.optimizer), "left": len(alive)}


def hidden_states(case: dict, world: World) -> None:
    """Write what a divided target makes of this rank's row of two documents, or why it is refused."""
    try:
        target = load_target(TargetConfig(case["target"]), "cpu", case["placement"], world)
    except UserError as error:
        return torch.save({"refused": str(error)}, f"{case['out']}-{world.rank}")
    tokens, positions = a_row(world.rank)
    with FlopCounterMode(display=False) as counter:
        hidden = target.own_states(tokens, positions, [[9, 11]])
    parts = [x.to_local() if isinstance(x, DTensor) else x for x in target.model.parameters()]
    found = {"hidden": hidden, "fingerprint": target.identity.fingerprint, "own": sum(part.numel() for part in parts)}
    found["flops"] = counter.get_total_flops()
    with patch.object(DTensor, "full_tensor", side_effect=AssertionError("gathered")):
        assert fingerprint(target.model) == target.identity.fingerprint
    torch.save(found, f"{case['out']}-{world.rank}")


def samples(world: World) -> None:
    """A divided tensor's sample must be the whole one's, also where ranks have unequal parts, or none."""
    for shape in ((), (1,), (5,), (40,), (7, 9), (64, 3), (3, 5, 8)):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).relu().neg()  # -0 among them
        for dim in range(len(shape)):
            for placement in (Shard(dim), _StridedShard(dim, split_factor=2), Replicate()):
                divided = distribute_tensor(whole, world.mesh, [placement], src_data_rank=None)
                assert torch.equal(bits_of(divided), bits_of(whole)), (shape, placement)


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return sample_of(tensor).view(torch.int16)


def a_row(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions [1, 20] of two documents."""
    one, other = random_tokens(9, 11, seed=rank)
    return torch.tensor([one + other]), torch.cat((torch.arange(9), torch.arange(11)))[None]


def main(data: Path, cases: list[dict]) -> None:
    """`cases`: {"out": ..., "parallel": {...}, "train": {...}} and what else `one_run` reads, or `hidden_states`."""
    host = f"host{int(os.environ['RANK']) // cases[0].get('ranks_of_a_node', 99)}"
    with patch("socket.gethostname", return_value=host):
        world = distributed.start("cpu", shard_size=cases[0].get("shard_size"), group=True)
    for case in cases:
        print(f"case {case}", flush=True)  # the last one in the output is the one that failed
        if "samples" in case:
            samples(world)
        elif "target" in case:
            hidden_states(case, world)
        else:
            one_run(data, case, world)
    distributed.leave()
