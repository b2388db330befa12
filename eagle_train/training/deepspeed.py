"""DeepSpeed's ZeRO as a backend (backend.py). Imported only where parallel.backend=deepspeed.

Its JSON is _composed here from our own config. Knows nothing of losses, data or files.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import get_default_build_root

from eagle_train.distributed import World
from eagle_train.drafts import Draft
from eagle_train.errors import UserError
from eagle_train.training.backend import ParallelConfig, Tensors
from eagle_train.training.optimizer import OptimConfig, Optimizer

_LOG = logging.getLogger(__name__)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_EXTENSION = "deepspeed_shm_comm"  # C++ that DeepSpeed builds on a CPU when it is first used there
_LONGEST_BUILD_S = 600.0


def _composed(optim: OptimConfig, parallel: ParallelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration. The trainer accumulates gradients, so DeepSpeed counts one micro-batch a step."""
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


def _choose_accelerator(device: str) -> None:
    """Select the CPU where it is wanted. To be called before DeepSpeed is imported, which selects for good."""
    if device == "cpu" or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def _await_build() -> None:
    """Wait as long as another process builds DeepSpeed's extension.

    torch does so too, but without end or a word, also for one that was killed and so left its lock. A lock that is
    older than any build takes is removed.
    """
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    is_told = False
    while lock := next(chain(root.glob(f"{_EXTENSION}/lock"), root.glob(f"*/{_EXTENSION}/lock")), None):
        with contextlib.suppress(FileNotFoundError):  # who made it, or another rank, removes it as well
            if time.time() - lock.stat().st_mtime > _LONGEST_BUILD_S:
                lock.unlink()
                _LOG.warning("removed %s: who made it was killed before it had built %s", lock, _EXTENSION)
        if lock.exists() and not is_told:
            minutes = round(_LONGEST_BUILD_S / 60)
            _LOG.info("waiting for the process that builds %s, %d minutes at most", lock.parent, minutes)
            is_told = True
        time.sleep(0.1)


def check_zero(zero: Mapping[str, Any], device: str) -> None:
    """Raise UserError for settings that DeepSpeed does not know."""
    _choose_accelerator(device)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    try:
        DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("parallel.zero", *first["loc"])))
        raise UserError(f"{key}={first['input']}: {first['msg']}") from error


class _Gathered(Mapping[str, torch.Tensor]):
    """Tensors that are gathered from all ranks each time they are looked up, and not kept."""

    def __init__(self, gather: dict[str, Callable[[], torch.Tensor]]):
        self._gather = gather

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._gather[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._gather)

    def __len__(self) -> int:
        return len(self._gather)


class DeepSpeed:
    """ZeRO-1, 2 or 3 around torch's AdamW."""

    def __init__(self, draft: Draft, optim: OptimConfig, parallel: ParallelConfig, world: World, dtype: torch.dtype):
        assert world.mesh is not None  # it needs a group even for one process
        _choose_accelerator(world.mesh.device_type)
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads it in a process without a launcher too
        import deepspeed
        from deepspeed.runtime import utils

        self._tools, self._norms = deepspeed.utils, utils
        self._names = {parameter: name for name, parameter in draft.named_parameters()}
        self._shapes = {name: parameter.shape for name, parameter in draft.named_parameters()}  # not yet sharded
        begins = {} if dtype == torch.float32 else {weight: weight.detach().cpu() for weight in self._names}
        optimizer = Optimizer(draft, optim).parts[0]
        _await_build()
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=draft, optimizer=optimizer, config=_composed(optim, parallel, dtype), dist_init_required=False
        )
        for weight, whole in begins.items():  # DeepSpeed makes its fp32 weights of those that it has rounded
            self._tools.safe_set_full_fp32_param(weight, whole)
        self.draft, self.divisor = self._engine, world.size
        self._make_moments()

    def _make_moments(self) -> None:
        """Create AdamW's state before its first step, so that a checkpoint can be read into it.

        ZeRO-1 and 2 link each weight with its moments once, after the first group's step, when other groups have none.
        """
        inner = self._optimizer.optimizer
        groups = [parameter for group in inner.param_groups for parameter in group["params"]]
        for parameter in getattr(self._optimizer, "fp32_partitioned_groups_flat", groups):  # ZeRO-3 has its own list
            if not inner.state[parameter]:
                zeros = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
                inner.state[parameter] = {"step": torch.zeros((), device=parameter.device), **zeros}
        if hasattr(self._optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def begin(self, last: bool) -> None:
        self._last = last
        self._engine.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)
        if not self._last:
            self._engine.step()  # only counts

    def clip(self) -> torch.Tensor:
        """The norm only; clipping is a part of `step`. Infinite where a gradient is not finite."""
        if hasattr(self._optimizer, "scaled_global_norm"):  # ZeRO-1 and 2
            return torch.as_tensor(self._optimizer.scaled_global_norm())
        if hasattr(self._optimizer, "_get_norm_groups"):  # ZeRO-3
            groups = self._optimizer._get_norm_groups()
        else:  # ZeRO-1 in bf16
            dense, _ = self._optimizer.get_grads_for_norm()
            groups = [self._norms.get_global_norm_of_tensors(dense, mpu=self._optimizer.mpu)]
        return torch.as_tensor(self._norms.combine_grad_norm_groups(groups))  # parts that are not finite are -1

    def step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()

    def skip(self) -> None:
        """DeepSpeed's step, which clears the gradients, with AdamW's own step left out."""
        inner = self._optimizer.optimizer
        inner.step = lambda *_: None
        self._engine.step()
        del inner.step
        if hasattr(self._optimizer, "averaged_gradients"):  # ZeRO-1 and 2
            # With an offloaded optimiser in bf16, DeepSpeed keeps gradients that are not finite and adds to them.
            self._optimizer.averaged_gradients = {}

    def state(self) -> tuple[Tensors, Tensors]:
        draft: dict[str, Callable[[], torch.Tensor]] = {
            name: partial(self._tools.safe_get_full_fp32_param, weight) for weight, name in self._names.items()
        }
        optimizer: dict[str, Callable[[], torch.Tensor]] = {}
        for weight, name in self._names.items():
            for moment in _MOMENTS:
                gather = partial(self._tools.safe_get_full_optimizer_state, weight, moment)
                optimizer[f"state.{name}.{moment}"] = gather
            optimizer[f"state.{name}.step"] = lambda: self._counter().detach().float().cpu().clone()
        return _Gathered(draft), _Gathered(optimizer)

    def restore(self, read: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Read one weight and its moments at a time: each rank needs them whole, and takes its part."""
        for weight, name in self._names.items():
            moments = {moment: torch.empty(self._shapes[name]) for moment in _MOMENTS}
            whole, steps = torch.empty(self._shapes[name]), torch.empty(())
            state = {f"state.{name}.{moment}": tensor for moment, tensor in moments.items()}
            read({name: whole, f"state.{name}.step": steps, **state})
            self._tools.safe_set_full_fp32_param(weight, whole)
            for moment, tensor in moments.items():
                self._tools.safe_set_full_optimizer_state(weight, tensor, moment)
        if hasattr(self._optimizer, "update_lp_params"):  # the copies in low precision that are computed with
            self._optimizer.update_lp_params()
        else:
            for part in range(len(self._optimizer.fp32_partitioned_groups_flat)):
                self._optimizer._reassign_or_swap_out_partitioned_parameters(part)
        for moments in self._optimizer.optimizer.state.values():
            moments["step"].copy_(steps)

    def _counter(self) -> torch.Tensor:
        """The number of steps that AdamW has made, a scalar tensor."""
        return next(iter(self._optimizer.optimizer.state.values()))["step"]
