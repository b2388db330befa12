"""DeepSpeed's ZeRO behind the seam of backend.py. Loaded only where parallel.backend=deepspeed.

Its JSON is composed here from our own config. Knows nothing of losses, data or files.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from eagle_train.distributed import World
from eagle_train.errors import UserError
from eagle_train.models.draft import Draft
from eagle_train.training.backend import ParallelConfig, Tensors
from eagle_train.training.optimizer import OptimConfig, Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def composed(optim: OptimConfig, parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's JSON. Accumulation is the trainer's, so every micro-batch is one of one here."""
    zero = {"stage": 2, **parallel.zero}
    if parallel.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optim.max_grad_norm,
        "bf16": {"enabled": dtype == torch.bfloat16, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def choose_accelerator(device: str) -> None:
    """To be called before DeepSpeed is imported, which chooses for good then."""
    if device == "cpu" or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def check_zero(zero: Mapping[str, Any], device: str) -> None:
    """Raise UserError for settings that DeepSpeed does not know."""
    choose_accelerator(device)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("parallel.zero", *first["loc"])))
        raise UserError(f"{key}={first['input']}: {first['msg']}") from error


class Gathered(Mapping[str, torch.Tensor]):
    """Tensors that are put together from all ranks each time they are asked for, and not kept."""

    def __init__(self, gather: dict[str, Callable[[], torch.Tensor]]):
        self.gather = gather

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.gather[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.gather)

    def __len__(self) -> int:
        return len(self.gather)


class DeepSpeed:
    """ZeRO-1, 2 or 3 around torch's AdamW."""

    def __init__(self, draft: Draft, optim: OptimConfig, parallel: ParallelConfig, world: World, dtype: torch.dtype):
        choose_accelerator(world.mesh.device_type)
        os.environ.setdefault("LOCAL_RANK", "0")  # which it asks of a process that no launcher has started, too
        import deepspeed
        from deepspeed.runtime import utils

        self.tools, self.norms = deepspeed.utils, utils
        self.names = {parameter: name for name, parameter in draft.named_parameters()}
        self.shapes = {name: parameter.shape for name, parameter in draft.named_parameters()}  # not yet divided
        optimizer = Optimizer(draft, optim).parts[0]
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=draft, optimizer=optimizer, config=composed(optim, parallel, dtype), dist_init_required=False
        )
        self.draft, self.divisor = self.engine, world.size
        self.make_moments()

    def make_moments(self) -> None:
        """AdamW's state before its first step, so that a checkpoint can be read into it.

        ZeRO-1 and 2 link each weight with its moments once, after the first group's step, when the others have none.
        """
        inner = self.optimizer.optimizer
        groups = [parameter for group in inner.param_groups for parameter in group["params"]]
        for parameter in getattr(self.optimizer, "fp32_partitioned_groups_flat", groups):  # ZeRO-3 keeps its own list
            if not inner.state[parameter]:
                zeros = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
                inner.state[parameter] = {"step": torch.zeros((), device=parameter.device), **zeros}
        if hasattr(self.optimizer, "_lazy_init_hp_params_optimizer_state"):
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def begin(self, last: bool) -> None:
        self.last = last
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)
        if not self.last:
            self.engine.step()  # only counts

    def clip(self) -> torch.Tensor:
        """The norm only: the cutting is a part of `step`. Infinity where a gradient is not finite."""
        if hasattr(self.optimizer, "scaled_global_norm"):  # ZeRO-1 and 2
            return torch.as_tensor(self.optimizer.scaled_global_norm())
        if hasattr(self.optimizer, "_get_norm_groups"):  # ZeRO-3
            groups = self.optimizer._get_norm_groups()
        else:  # ZeRO-1 in bf16
            dense, _ = self.optimizer.get_grads_for_norm()
            groups = [self.norms.get_global_norm_of_tensors(dense, mpu=self.optimizer.mpu)]
        return torch.as_tensor(self.norms.combine_grad_norm_groups(groups))  # its parts say -1 for what is not finite

    def step(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()

    def skip(self) -> None:
        """DeepSpeed's own step, which cleans up, without AdamW's."""
        inner = self.optimizer.optimizer
        inner.step = lambda *_: None
        self.engine.step()
        del inner.step
        if hasattr(self.optimizer, "averaged_gradients"):  # ZeRO-1 and 2
            # With an offloaded optimiser in bf16, DeepSpeed keeps those that are not finite and adds the next to them.
            self.optimizer.averaged_gradients = {}

    def state(self) -> tuple[Tensors, Tensors]:
        draft = {name: partial(self.tools.safe_get_full_fp32_param, weight) for weight, name in self.names.items()}
        optimizer: dict[str, Callable[[], torch.Tensor]] = {}
        for weight, name in self.names.items():
            for moment in MOMENTS:
                gather = partial(self.tools.safe_get_full_optimizer_state, weight, moment)
                optimizer[f"state.{name}.{moment}"] = gather
            optimizer[f"state.{name}.step"] = lambda: self.counter().detach().float().cpu().clone()
        return Gathered(draft), Gathered(optimizer)

    def restore(self, read: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """A weight and its moments at a time: each rank needs them whole, and takes its part."""
        for weight, name in self.names.items():
            moments = {moment: torch.empty(self.shapes[name]) for moment in MOMENTS}
            whole, steps = torch.empty(self.shapes[name]), torch.empty(())
            state = {f"state.{name}.{moment}": tensor for moment, tensor in moments.items()}
            read({name: whole, f"state.{name}.step": steps, **state})
            self.tools.safe_set_full_fp32_param(weight, whole)
            for moment, tensor in moments.items():
                self.tools.safe_set_full_optimizer_state(weight, tensor, moment)
        if hasattr(self.optimizer, "update_lp_params"):  # what is computed with are copies
            self.optimizer.update_lp_params()
        else:
            for part in range(len(self.optimizer.fp32_partitioned_groups_flat)):
                self.optimizer._reassign_or_swap_out_partitioned_parameters(part)
        for moments in self.optimizer.optimizer.state.values():
            moments["step"].copy_(steps)

    def counter(self) -> torch.Tensor:
        """How many steps AdamW has made."""
        return next(iter(self.optimizer.optimizer.state.values()))["step"]
