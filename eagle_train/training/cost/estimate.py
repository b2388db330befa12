"""The cost of a training run: FLOPs, memory of each GPU, duration. Known before a weight is loaded.

Measured by tests/training/test_cost.py: the memory of one process's real steps at their peak, within 5 % and part by
part, and FSDP2's of a draft on two ranks, within 5 %. All else is formula: DDP's and DeepSpeed's buckets, a sharded or
offloaded target, the host's memory. Knows nothing of data or files.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from eagle_train.drafts import DraftConfig
from eagle_train.errors import check
from eagle_train.hardware import computes_fp8
from eagle_train.models.loading import TargetConfig
from eagle_train.models.state_files import read_header
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost.flops import flops_of
from eagle_train.training.cost.memory import (
    activations,
    draft_state,
    loss_memory,
    target_activations,
    target_weights,
)
from eagle_train.training.cost.offline import Offline
from eagle_train.training.cost.target_shape import TargetShape
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.train_config import TrainConfig

GIB = 2**30
USABLE = 0.92  # of a GPU's memory; the rest is lost between blocks
_FP8_SPEED = 2.0  # times the FLOP/s of bf16 (NVIDIA's data sheets, Hopper); the same share of them is reached
_CUDA_GIB = 1.0  # what CUDA and its libraries take before anything is computed


@dataclass
class ClusterConfig:
    """The group `cluster`: the GPUs that `plan=true` computes for. Raises UserError for values that cannot be.

    The defaults are H100s: 80 GB, 989 dense bf16 TFLOP/s, 3.35 TB/s (NVIDIA's data sheet), of which copies reach 3.0.
    `mfu`: the share of their FLOP/s that the job reaches. `memory_tb_s` and `sum_us` are for plans of decoding.
    """

    gpus: int | None = None  # null: as many as there are processes
    gpus_per_node: int = 8  # of them; where they are no whole nodes, one node has all
    memory_gib: float = 80.0  # of a GPU
    tflops: float = 989.0  # of a GPU, dense bf16; an H100's
    mfu: float = 0.4  # the share of them that the job reaches
    memory_tb_s: float = 3.0  # TB a second that a GPU reads of its memory
    sum_us: float = 20.0  # microseconds of a sum of a few rows over the GPUs, of a node by NCCL, say
    disk_gib_s: float = 5.0  # GiB a second that a node reads from its storage, or writes: of target=cached, eagle-cache

    def __post_init__(self) -> None:
        check(self.gpus is None or self.gpus >= 1, f"cluster.gpus={self.gpus}: must be at least 1, or null")
        check(self.gpus_per_node >= 1, f"cluster.gpus_per_node={self.gpus_per_node}: must be at least 1")
        for key in ("memory_gib", "tflops", "memory_tb_s", "sum_us", "disk_gib_s"):
            check(getattr(self, key) > 0, f"cluster.{key}={getattr(self, key)}: must be above 0")
        check(0 < self.mfu <= 1, f"cluster.mfu={self.mfu}: must be above 0 and at most 1")

    def node_of(self, ranks: int) -> int:
        """The GPUs of a node where there are `ranks` of them."""
        return ranks if ranks % self.gpus_per_node else self.gpus_per_node

    def disk_speed(self, ranks: int) -> float:
        """Bytes a second that all nodes of a job of `ranks` processes read together."""
        return self.disk_gib_s * GIB * ranks / self.node_of(ranks)

    @property
    def room(self) -> float:
        """Bytes of a GPU that a job may use."""
        return USABLE * self.memory_gib * GIB


@dataclass(frozen=True)
class CostEstimate:
    """The cost of a run on `gpus` GPUs.

    `flops`: of one token, by part. `memory`: bytes on one GPU, by part. `host`: bytes in the memory of its host.
    `saved`: FLOPs of a token that FP8 takes no time for, where a GPU has it.
    `tokens_per_s`: of all GPUs. `seconds`: of the whole run. `layout`: what is divided over how many GPUs, in lines.
    `offline`: of the target's states on disk, from which the run reads them where the target has no layers, and else
    might.
    """

    target: TargetShape
    draft_parameters: int
    flops: Mapping[str, float]
    memory: Mapping[str, float]
    host: float
    gpus: int
    saved: float
    tokens_per_s: float
    seconds: float
    layout: tuple[str, ...] = ()
    offline: Offline | None = None

    @property
    def reads(self) -> bool:
        """Whether the target's states are read from disk."""
        return not self.target.layers

    def timed_flops(self, device: torch.device | str) -> dict[str, float]:
        """FLOPs of a token by part, without those that take no time on this device."""
        saved = self.saved if computes_fp8(device) else 0.0
        return {part: each - (saved if part == "target" else 0.0) for part, each in self.flops.items()}


def estimate_cost(
    target: TargetShape,
    draft: DraftConfig,
    train: TrainConfig,
    optim: OptimConfig,
    parallel: ParallelConfig,
    cluster: ClusterConfig,
    row_tokens: int,
    ranks: int,
    dtype: torch.dtype = torch.bfloat16,
    loaded: TargetConfig | None = None,
    token_bytes: int | None = None,
) -> CostEstimate:
    """The cost of a job of `ranks` processes with one GPU each.

    `dtype`: what the GPUs compute in. `loaded`: how the target is loaded, which says what of it is offloaded.
    `token_bytes`: of a cache of the target's states that is read; None: as the target would be cached.
    """
    with torch.device("meta"):
        module = draft.module()
    recomputed, passes = parallel.activation_checkpointing, draft.passes(train.unroll)
    flops, in_fp8 = flops_of(target, draft, module, row_tokens, recomputed, passes), train.target_quant == "fp8"
    saved = 2 * target.rounded * (1 - 1 / _FP8_SPEED) if in_fp8 else 0.0
    offline = _offline(flops, saved, cluster, ranks, token_bytes or _token_bytes(target, draft, dtype))
    step = offline.target + offline.draft
    tokens_per_s = 1 / (step if target.layers else max(step, offline.disk))
    tokens = train.micro_batch_rows * row_tokens
    accumulated = optim.tokens_per_step > tokens * ranks
    weights, host = draft_state(module, optim, parallel, ranks, dtype, accumulated)
    of_target = tokens * dtype.itemsize * target_activations(target, parallel, ranks)
    kept, again = (tokens * each for each in activations(draft, dtype, recomputed, passes))
    states, chunk = loss_memory(target, draft, tokens, dtype, passes)
    of_draft, of_loss = kept + max(0, again - chunk), states + chunk  # the loss is over when a layer runs again
    memory = {
        "target's weights": target_weights(target, parallel, ranks, dtype, in_fp8),
        "draft's weights, gradients and optimiser": weights,
        "draft's activations": of_draft,
        "hidden states and the loss": of_loss,
        "target's activations beyond these": max(0, of_target - of_draft - of_loss),  # gone when these come
        "CUDA": _CUDA_GIB * GIB,
    }
    if in_fp8:
        before = target_weights(target, parallel, ranks, dtype) + _CUDA_GIB * GIB  # of what is not there yet, no draft
        memory["loading the target, beyond these"] = max(0, before - sum(memory.values()))
    if loaded and loaded.offload:  # the rest waits in the host's memory
        left = cluster.room - sum(memory.values()) + memory["target's weights"]
        room = left if loaded.device_gib is None else loaded.device_gib * GIB
        fits = max(0.0, min(memory["target's weights"], room))
        host += memory["target's weights"] - fits
        memory["target's weights"] = fits
    return CostEstimate(
        target,
        module.num_parameters,
        flops,
        memory,
        host,
        ranks,
        saved,
        tokens_per_s,
        _seconds(train, optim, tokens_per_s),
        tuple(_layout(parallel, ranks)),
        offline,
    )


def _token_bytes(target: TargetShape, draft: DraftConfig, dtype: torch.dtype) -> int:
    """What a token takes on disk, with all states that the draft wants, as the target computes them."""
    return target.hidden * dtype.itemsize * (1 + len(draft.target_layers))


def _offline(
    flops: Mapping[str, float],
    saved: float,
    cluster: ClusterConfig,
    ranks: int,
    token_bytes: int,
) -> Offline:
    """The seconds of a token for the target and all else, and of reading it."""
    speed = ranks * cluster.tflops * 1e12 * cluster.mfu
    draft = sum(flops.values()) - flops["target"]
    disk = token_bytes / cluster.disk_speed(ranks)
    return Offline(token_bytes, (flops["target"] - saved) / speed, draft / speed, disk)


def _layout(parallel: ParallelConfig, ranks: int) -> Iterator[str]:
    """What `CostEstimate.layout` has."""
    if parallel.target != "replicated":
        yield f"the target is divided over {_of(parallel.target_shard_size_of(ranks), ranks)}"
    if parallel.backend == "fsdp2":
        once = parallel.reshard_after_forward is False
        gathered = "gathered once a step" if once else "gathered for each forward and each backward pass"
        yield f"the draft is divided over {_of(parallel.draft_shard_size_of(ranks), ranks)}, and {gathered}"


def _of(number: int, ranks: int) -> str:
    return f"all {ranks} GPUs" if number == ranks else f"each {number} of {ranks} GPUs"


@dataclass(frozen=True)
class PlannedRun:
    """What a run's cost depends on beside how it is divided (`estimate_cost`). Counts the target when it is asked."""

    target: TargetConfig
    hf_config: Any
    draft: DraftConfig
    train: TrainConfig
    optim: OptimConfig
    cluster: ClusterConfig
    row_tokens: int
    ranks: int
    dtype: torch.dtype

    def cost(self, parallel: ParallelConfig) -> CostEstimate:
        """The cost of the run divided so, with all choices made. Raises UserError where the target is none."""
        given = self.train, self.optim, parallel, self.cluster, self.row_tokens, self.ranks, self.dtype, self.target
        return estimate_cost(self._shape, self.draft, *given, self._token_bytes)

    def fits(self, parallel: ParallelConfig) -> bool:
        """Whether a GPU has the memory for it."""
        return sum(self.cost(parallel).memory.values()) <= self.cluster.room

    @cached_property
    def _shape(self) -> TargetShape:
        shape = TargetShape.of(self.hf_config, self.target.trust_remote_code, f"target.path={self.target.path}")
        return shape.without_layers() if self.target.cached else shape

    @cached_property
    def _token_bytes(self) -> int | None:
        """Of a cache that is read."""
        if not self.target.cached:
            return None
        return sum(read_header(Path(self.target.path), f"target.path={self.target.path}").layout.widths.values())


def _seconds(train: TrainConfig, optim: OptimConfig, tokens_per_s: float) -> float:
    if train.steps is not None:
        return train.steps * optim.tokens_per_step / tokens_per_s
    assert train.minutes is not None  # one of them is given
    return 60 * train.minutes
