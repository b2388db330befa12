"""How a step's gradients become new weights on all ranks: one process, DDP, FSDP2 or DeepSpeed, behind one seam.

The trainer calls `begin`, `draft` (its forward), `backward`, `clip` and `step`, and sees no difference. Weights and
optimiser state are fp32, whatever the computation is in. States are kept by the draft's own tensor names, so that a
checkpoint of one backend is read by another, on any number of ranks. Knows nothing of losses, data or files.
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

from eagle_train.errors import check
from eagle_train.models.draft import Draft
from eagle_train.models.loading import PLACEMENTS
from eagle_train.training.optimizer import OptimConfig, Optimizer

Tensors = Mapping[str, torch.Tensor]
BACKENDS = ("single", "ddp", "fsdp2", "deepspeed")


@dataclass
class ParallelConfig:
    """The group `parallel`. Raises UserError for values that cannot be.

    `backend`: how the draft is trained on several processes. `target`: where the frozen target's weights are, whole on
    every rank (replicated), or divided by FSDP2 or by its tensor-parallel plan; `share` is the number of neighbouring
    ranks that hold one target together, None for all. `offload_optimizer`: weights and optimiser state in host memory.
    `timeout_minutes`: how long a rank waits for another before the job ends. `zero`: DeepSpeed's `zero_optimization`.
    """

    backend: str = "single"
    target: str = "replicated"
    share: int | None = None
    offload_optimizer: bool = False
    activation_checkpointing: bool = False
    compile: bool = False
    timeout_minutes: float = 30.0
    zero: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, allowed in (("backend", BACKENDS), ("target", PLACEMENTS)):
            check(
                getattr(self, key) in allowed,
                f"parallel.{key}={getattr(self, key)}: must be one of {', '.join(allowed)}",
            )
        check(self.share is None or self.share >= 1, f"parallel.share={self.share}: must be at least 1")
        check(
            self.target != "replicated" or self.share is None,
            f"parallel.share={self.share}: a replicated target is not shared; use parallel.target=fsdp2 or tensor",
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
        for key in ("offload_optimizer", "offload_param"):  # which a plan would not know of
            check(key not in self.zero, f"parallel.zero.{key}: not here; use parallel.offload_optimizer=true")
        check(self.timeout_minutes > 0, f"parallel.timeout_minutes={self.timeout_minutes}: must be above 0")

    @property
    def needs_group(self) -> bool:
        """Whether even a process alone needs a process group."""
        return self.backend != "single" or self.target != "replicated"

    def check_job(self, optim: OptimConfig, ranks: int) -> None:
        """Raise UserError, before any weight is loaded, for a job that the backend cannot run."""
        check(
            self.backend != "single" or ranks == 1,
            f"parallel=single: {ranks} processes were started; use parallel=ddp, fsdp2 or deepspeed_zero2",
        )
        if self.backend == "deepspeed":
            check(optim.name == "adamw", f"optim.name={optim.name}: DeepSpeed trains with adamw here; use parallel=ddp")
            check(
                importlib.util.find_spec("deepspeed") is not None,
                "parallel.backend=deepspeed: it is not installed; run `pip install 'eagle-train[deepspeed]'`",
            )


class Backend(Protocol):
    """What the trainer needs. `draft` has the signature of `Draft.forward`.

    `divisor`: by how much a rank's gradients are divided when they are added to the others'.
    """

    draft: Callable[..., torch.Tensor]
    divisor: int

    def begin(self, last: bool) -> None:
        """Before a micro-batch's forward; with the `last` of a step, gradients are added up over the ranks."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's gradients."""

    def clip(self) -> torch.Tensor:
        """The norm of the step's gradient over all ranks, a scalar; a longer one is cut to `optim.max_grad_norm`."""

    def step(self, lr: float) -> None:
        """Change the weights by the gradients, and forget these."""

    def skip(self) -> None:
        """Forget the gradients and leave the weights alone."""

    def state(self) -> tuple[Tensors, Tensors]:
        """The draft's tensors and the optimiser's, by name; a rank's parts as DTensors where they are divided.

        Where a tensor must be gathered, that happens when it is asked for: every rank asks for all, in their order.
        """

    def restore(self, read: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Go on from another state: `read` fills the tensors it is given, by the names that `state` has."""


class Torch:
    """torch's own optimisers, on a draft that is whole (single), copied (DDP) or divided (FSDP2)."""

    def __init__(self, module: Draft, forward: nn.Module, optim: OptimConfig, ranks: int):
        self.module, self.draft, self.optim = module, forward, optim
        self.divisor = ranks
        self.optimizer = Optimizer(module, optim)

    def begin(self, last: bool) -> None:
        if isinstance(self.draft, FSDPModule):
            self.draft.set_requires_gradient_sync(last)
        elif isinstance(self.draft, DistributedDataParallel):
            self.draft.require_backward_grad_sync = last

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def clip(self) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.optim.max_grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def step(self, lr: float) -> None:
        self.optimizer.step(lr)
        self.optimizer.zero_grad()

    def skip(self) -> None:
        self.optimizer.zero_grad()

    def state(self) -> tuple[Tensors, Tensors]:
        draft, optimizer = get_state_dict(self.module, self.optimizer.parts, options=FLAT)
        return draft, tensors_of(optimizer)

    def restore(self, read: Callable[[dict[str, torch.Tensor]], None]) -> None:
        draft, optimizer = get_state_dict(self.module, self.optimizer.parts, options=FLAT)
        read(draft | tensors_of(optimizer))
        set_state_dict(
            self.module, self.optimizer.parts, model_state_dict=draft, optim_state_dict=optimizer, options=FLAT
        )


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # `state.NAME.exp_avg` and the like, one level deep


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an optimiser's flat state; the rest of it, the groups' settings, follows from the config."""
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
