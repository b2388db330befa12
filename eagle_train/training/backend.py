"""How a step's gradients become new weights on all ranks: one process, DDP, FSDP2 or DeepSpeed, with one interface.

The trainer calls `begin`, `draft` (its forward), `backward`, `clip` and `step`, and need not know which it is. Weights
and optimiser state are fp32, in whatever dtype the draft computes. States have the draft's own tensor names, so that
a checkpoint of one backend is read by another, on any number of ranks. Knows nothing of losses, data or files.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from eagle_train.drafts import Draft
from eagle_train.errors import check, typed
from eagle_train.models.loading import PLACEMENTS
from eagle_train.training.optimizer import OptimConfig, Optimizer

Tensors = Mapping[str, torch.Tensor]
BACKENDS = ("single", "ddp", "fsdp2", "deepspeed")
SPANS = ("node", "world")  # beside a number of ranks


@dataclass
class ParallelConfig:
    """The group `parallel`. Raises UserError for values that cannot be.

    `backend`: how the draft is trained on several processes. `target`: where the frozen target's weights are, whole on
    every rank (replicated), or sharded by FSDP2 or by its tensor-parallel plan. `target_shard_size`: how many
    neighbouring ranks hold one target together; `draft_shard_size`: over how many of them FSDP2 divides one draft; each
    a number, `node` or `world`. Other ranks hold copies; those of the draft add their gradients up.
    `reshard_after_forward`: FSDP2 gathers a layer anew for its backward pass, else a step gathers each layer once.
    None, of these three, is chosen by what fits (placement.py). `offload_optimizer`: weights and optimiser state in
    host memory.
    `compile`: None compiles on a GPU, but no layers for DeepSpeed and no divided target, and goes on without where
    torch.compile fails. Of a cache of hidden states there are the draft's layers alone.
    `timeout_minutes`: how long a rank waits for another before the job ends. `zero`: DeepSpeed's `zero_optimization`.
    """

    backend: str = "single"  # single | ddp | fsdp2 | deepspeed
    target: str = "replicated"  # replicated | fsdp2 | tensor: where the frozen target's weights are
    target_shard_size: int | str | None = None  # NUMBER | node | world: ranks that hold a target; null: node if it fits
    draft_shard_size: int | str | None = None  # NUMBER | node | world: ranks that hold a draft; null: node if it fits
    reshard_after_forward: bool | None = None  # fsdp2 gathers layers again for the backward pass; null: if it must
    offload_optimizer: bool = False  # fp32 weights and optimiser state in host memory
    activation_checkpointing: bool = False  # the draft's layers run again in the backward pass
    compile: bool | None = None  # torch.compile of target (if not cached) and draft layers; null: on a GPU, if whole
    timeout_minutes: float = 30.0  # for which a rank waits for another before the job ends
    zero: dict[str, Any] = field(default_factory=dict)  # DeepSpeed's zero_optimization

    def __post_init__(self) -> None:
        for key, allowed in (("backend", BACKENDS), ("target", PLACEMENTS)):
            check(
                getattr(self, key) in allowed,
                f"parallel.{key}={getattr(self, key)}: must be one of {', '.join(allowed)}",
            )
        for key in ("target_shard_size", "draft_shard_size"):
            value = getattr(self, key)
            sound = value in (None, *SPANS) or (isinstance(value, int) and value >= 1)
            check(sound, f"parallel.{key}={value}: must be at least 1, or {' or '.join(SPANS)}")
        check(
            self.target != "replicated" or self.target_shard_size is None,
            f"parallel.target_shard_size={self.target_shard_size}: a replicated target is not sharded; use "
            "parallel.target=fsdp2 or tensor",
        )
        for key in ("draft_shard_size", "reshard_after_forward"):
            value = getattr(self, key)
            check(
                value is None or self.backend == "fsdp2",
                f"parallel.{key}={typed(value)}: parallel.backend={self.backend} does not read it; use fsdp2",
            )
        check(
            not self.offload_optimizer or self.backend in ("fsdp2", "deepspeed"),
            f"parallel.offload_optimizer=true: parallel.backend={self.backend} cannot; use fsdp2 or deepspeed",
        )
        check(
            not self.zero or self.backend == "deepspeed",
            f"parallel.zero: only DeepSpeed reads it, and parallel.backend is {self.backend}",
        )
        stage = self.zero.get("stage", 2)
        check(stage in (1, 2, 3), f"parallel.zero.stage={stage}: must be 1, 2 or 3; parallel=ddp divides nothing")
        for key in ("offload_optimizer", "offload_param"):  # which the estimate of `plan=true` would not see
            check(key not in self.zero, f"parallel.zero.{key}: not here; use parallel.offload_optimizer=true")
        check(self.timeout_minutes > 0, f"parallel.timeout_minutes={self.timeout_minutes}: must be above 0")

    def target_shard_size_of(self, ranks: int) -> int:
        """The ranks of a job of `ranks` that hold one target together; None counts as all."""
        if self.target == "replicated":
            return 1
        assert not isinstance(self.target_shard_size, str), "chosen"
        return min(self.target_shard_size or ranks, ranks)

    def draft_shard_size_of(self, ranks: int) -> int:
        """The ranks of a job of `ranks` over which FSDP2 divides one draft; None counts as all."""
        assert not isinstance(self.draft_shard_size, str), "chosen"
        return min(self.draft_shard_size or ranks, ranks)

    @property
    def needs_group(self) -> bool:
        """Whether even a process alone needs a process group."""
        return self.backend != "single" or self.target != "replicated"

    def check_job(self, optim: OptimConfig, ranks: int) -> None:
        """Raise UserError, before any weight is loaded, for a job that cannot be run so. Before `compile` is chosen."""
        check(
            self.backend != "single" or ranks == 1,
            f"parallel=single: {ranks} processes were started; use parallel=ddp, fsdp2 or deepspeed_zero2",
        )
        check(
            not self.compile or self.target == "replicated",
            f"parallel.compile=true: a target that is divided (parallel.target={self.target}) cannot be compiled; use "
            "parallel.compile=null, which leaves it out",
        )
        if self.backend == "deepspeed":
            check(optim.name == "adamw", f"optim.name={optim.name}: DeepSpeed trains with adamw here; use parallel=ddp")
            check(
                importlib.util.find_spec("deepspeed") is not None,
                "parallel.backend=deepspeed: it is not installed; run `pip install 'eagle-train[deepspeed]'`",
            )


class Backend(Protocol):
    """What the trainer needs of a backend.

    `draft`: the forward, with the signature of `Draft.forward`. `divisor`: by what a rank's gradients are divided when
    they are reduced over the ranks; the trainer multiplies its loss with it.
    """

    draft: Callable[..., torch.Tensor]
    divisor: int

    def begin(self, last: bool) -> None:
        """Called before a micro-batch's forward. In the `last` one of a step gradients are reduced over the ranks."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's gradients."""

    def clip(self) -> torch.Tensor:
        """The norm of the step's gradient over all ranks, a scalar. Clips the gradient to `optim.max_grad_norm`."""

    def step(self, lr: float) -> None:
        """Update the weights at the learning rate `lr`, and clear the gradients."""

    def skip(self) -> None:
        """Clear the gradients and leave the weights as they are."""

    def state(self) -> tuple[Tensors, Tensors]:
        """The draft's tensors and the optimiser's, by name; DTensors where they are sharded.

        A tensor may be gathered when it is looked up, so all ranks look all of them up, in their order.
        """

    def restore(self, read: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Continue from another state: `read` fills the tensors it is given, by the names that `state` has."""


class Torch:
    """torch's own optimisers, on a draft that is whole (single), copied to all ranks (DDP) or sharded (FSDP2)."""

    def __init__(self, module: Draft, forward: nn.Module, optim: OptimConfig, ranks: int, keeps_whole: bool = False):
        """`keeps_whole`: FSDP2's layers stay gathered, in the dtype they compute in, until a step's last backward."""
        self._keeps_whole = keeps_whole
        self._module, self._optim = module, optim
        self.draft: Callable[..., torch.Tensor] = forward
        self.divisor = ranks
        self.optimizer = Optimizer(module, optim)

    def begin(self, last: bool) -> None:
        if isinstance(self.draft, FSDPModule):
            self.draft.set_requires_gradient_sync(last)
            self.draft.set_reshard_after_backward(last or not self._keeps_whole)
        elif isinstance(self.draft, DistributedDataParallel):
            self.draft.require_backward_grad_sync = last

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), self._optim.max_grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, lr: float) -> None:
        self.optimizer.step(lr)
        self.optimizer.zero_grad()

    def skip(self) -> None:
        self.optimizer.zero_grad()

    def state(self) -> tuple[Tensors, Tensors]:
        draft, optimizer = self._states()
        return draft, _tensors_of(optimizer)

    def restore(self, read: Callable[[dict[str, torch.Tensor]], None]) -> None:
        draft, optimizer = self._states()
        read(draft | _tensors_of(optimizer))
        set_state_dict(
            self._module, self.optimizer.parts, model_state_dict=draft, optim_state_dict=optimizer, options=_FLAT
        )

    def _states(self) -> tuple[Any, Any]:
        """Draft and optimiser as torch's state dicts; the optimiser's is made where it has made no step yet."""
        new = [part for part in self.optimizer.parts if not part.state]
        state: tuple[Any, Any] = get_state_dict(self._module, self.optimizer.parts, options=_FLAT)
        # torch makes missing state by a step of its own, at a learning rate of 0, which AdamW counts: the first real
        # one would be corrected as if it were the second.
        for counted in (each["step"] for part in new for each in part.state.values() if "step" in each):
            counted.zero_()
        return state


_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # one level of keys, `state.NAME.exp_avg`


def _tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an optimiser's flat state. The rest of it, the groups' settings, follows from the config."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
