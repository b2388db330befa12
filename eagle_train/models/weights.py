"""A model's weights wherever they lie, whole, divided over ranks or offloaded: looked at one by one, checked, and known
again by their fingerprint. Knows nothing of what a model computes.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import align_module_device
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from eagle_train.errors import check
from eagle_train.ops.torch_private import strided_shard


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be divided over ranks, on every rank."""
    own = tensor.detach() if isinstance(tensor, DTensor) else tensor
    return own.full_tensor() if isinstance(own, DTensor) else own


def _weights_of(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight by its name; one that Accelerate keeps elsewhere is fetched while it is looked at."""
    names = {name for name, _ in model.named_parameters()}  # tied ones have one
    for prefix, module in model.named_modules():
        with align_module_device(module):
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if name in names:
                    yield name, parameter


def check_loaded(model: PreTrainedModel, name: str) -> None:
    """Raise UserError if a weight is still on the meta device or is not finite."""
    for key, parameter in _weights_of(model):
        check(not parameter.is_meta, f"target {name}: {key} is on the meta device; load its weights first")
        own = parameter.detach()
        own = own.to_local() if isinstance(own, DTensor) else own
        sample = own.flatten()[:: max(1, own.numel() // 1024)].float()  # quantised types know no isfinite
        check(bool(sample.isfinite().all()), f"target {name}: {key} is not finite; the checkpoint is damaged")


def fingerprint(model: PreTrainedModel) -> str:
    """A short hash of 16 values of every weight, rounded to bf16, so that it is the same in every precision."""
    samples = {}
    for key, parameter in _weights_of(model):
        samples[key] = key.encode() + sample_of(parameter.detach()).cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(b"".join(samples[key] for key in sorted(samples))).hexdigest()[:16]


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """16 values of a tensor at even distances, in bf16; of a divided one on every rank, nothing else is gathered."""
    step = max(1, tensor.numel() // 16)
    if not isinstance(tensor, DTensor):
        return tensor.flatten()[::step][:16].to(torch.bfloat16).contiguous()
    own, mesh = tensor.to_local(), tensor.device_mesh
    wanted = torch.arange(0, tensor.numel(), step, device=own.device)[:16]
    is_own, index = torch.ones_like(wanted, dtype=torch.bool), []
    for dim, places in enumerate(torch.unravel_index(wanted, tensor.shape)):
        held = indices_held(tensor, dim)
        place_of = torch.full((tensor.shape[dim],), -1, device=own.device)
        place_of[held] = torch.arange(len(held), device=own.device)
        index.append(place_of[places])
        is_own &= index[-1] >= 0
    bits = torch.zeros_like(wanted, dtype=torch.int32)  # added up, because a sum of numbers would lose the sign of -0
    bits[is_own] = own[tuple(each[is_own] for each in index)].to(torch.bfloat16).view(torch.int16).int()
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(bits, group=mesh.get_group(dim))
    return bits.to(torch.int16).view(torch.bfloat16)


def indices_held(tensor: DTensor, dim: int) -> torch.Tensor:
    """Which indices of a dimension a rank's part has, in its order: those of a vector divided as the dimension is."""

    def placed(placement: Any) -> Placement:
        if getattr(placement, "dim", None) != dim:
            return Replicate()
        return Shard(0) if placement.is_shard() else strided_shard(0, placement.split_factor)

    indices = torch.arange(tensor.shape[dim], device=tensor.to_local().device)
    placements = [placed(each) for each in tensor.placements]
    return distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local()
