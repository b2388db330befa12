"""A draft prepared for its backend, in this order: recomputed layers, compiled, then sharded (FSDP2) or copied (DDP).

The draft and the training loop know nothing of it.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from eagle_train.distributed import World
from eagle_train.drafts import Draft
from eagle_train.models.layers import Attention
from eagle_train.ops.torch_private import with_own_graphs
from eagle_train.training.backend import Backend, ParallelConfig, Torch
from eagle_train.training.optimizer import OptimConfig


def prepare(draft: Draft, optim: OptimConfig, parallel: ParallelConfig, world: World, dtype: torch.dtype) -> Backend:
    """The backend for a draft that is fp32 and on its device, to be trained in `dtype`. Changes its layers in place.

    `parallel.compile`: None is False here, and `parallel.reshard_after_forward` True. The draft is divided as `world`
    says (`World.divided`).
    """
    for layer in draft.layers:
        if parallel.compile:
            _keep_own_graphs(layer)
        if parallel.activation_checkpointing:
            layer.forward = recomputed(layer.forward)
        if parallel.compile:
            layer.compile()
    if parallel.backend == "deepspeed":
        # Imported here: only this backend needs it to be installed.
        from eagle_train.training.deepspeed import DeepSpeed

        return DeepSpeed(draft, optim, parallel, world, dtype)
    if parallel.backend == "fsdp2":
        _shard(draft, parallel, world, dtype)
    whole: nn.Module = draft
    if parallel.backend == "ddp":
        assert world.mesh is not None  # DDP needs a group even for one process
        whole = DistributedDataParallel(draft, process_group=world.mesh.get_group(), broadcast_buffers=False)
    keeps_whole = parallel.backend == "fsdp2" and parallel.reshard_after_forward is False
    return Torch(draft, whole, optim, world.size, keeps_whole)


def _keep_own_graphs(layer: nn.Module) -> None:
    """Have torch.compile keep a layer's graphs for itself: those of all layers together exceed the number that it
    keeps, and the last ones would not be compiled. Attention has graphs too, before and after `attend`."""
    for module in (layer, *(each for each in layer.modules() if isinstance(each, Attention))):
        module.forward = MethodType(with_own_graphs(type(module).forward), module)


def _shard(draft: Draft, parallel: ParallelConfig, world: World, dtype: torch.dtype) -> None:
    """Shard the draft's weights layer by layer (FSDP2), over all ranks or over neighbours, of whom the others are
    copies (HSDP); gradients are reduced in fp32."""
    low = dtype if dtype != torch.float32 else None
    host = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    options: dict[str, Any] = {
        "mesh": world.draft_shard_mesh,
        # Inputs are not cast: among them are the rotary angles, which need more than bf16.
        "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False),
        "offload_policy": host if parallel.offload_optimizer else OffloadPolicy(),
    }
    for layer in draft.layers:
        fully_shard(layer, reshard_after_forward=parallel.reshard_after_forward is not False, **options)
    fully_shard(draft, **options)  # itself, that is what is in no layer, stays gathered until its backward pass


def recomputed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A layer's forward that keeps only its input, and is recomputed in the backward pass."""
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)
