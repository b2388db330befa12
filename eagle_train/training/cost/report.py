"""What `plan=true` prints: the cost of a run, what would make it fit, how long it takes. Loads no weights.

Raises what the run itself would raise before it loads weights. DESIGN section 3.10.
"""

import warnings
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.corpus.source import DataConfig
from eagle_train.drafts import planned_config
from eagle_train.hardware import resolve_device
from eagle_train.models.loading import DTYPES, TargetConfig, check_placement, load_config
from eagle_train.results import count_in_words, in_words, time_in_words
from eagle_train.settings import build
from eagle_train.training.assembly import (
    cached_dtype,
    check_drafted,
    check_job,
    check_lesson,
    check_planned_data,
    check_planned_start,
    tell_unserved,
)
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost.estimate import USABLE, ClusterConfig, CostEstimate, PlannedRun
from eagle_train.training.cost.this_machine import steps_here
from eagle_train.training.idle import tell_idle
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.placement import chosen
from eagle_train.training.train_config import TrainConfig


def cost_report(config: DictConfig, ranks: int) -> str:
    """The report for a composed config, on `ranks` processes or on `cluster.gpus` GPUs.

    Raises UserError for a job that could not start.
    """
    cluster = build(ClusterConfig, config.cluster, "cluster")
    train, optim = build(TrainConfig, config.train, "train"), build(OptimConfig, config.optim, "optim")
    parallel, data = build(ParallelConfig, config.parallel, "parallel"), build(DataConfig, config.data, "data")
    target = build(TargetConfig, config.target, "target")
    ranks = cluster.gpus or ranks
    hf_config = load_config(target)
    check_job(train, optim, parallel, data, target, hf_config, ranks, config.device)
    settings: Any = OmegaConf.to_container(config.draft)
    draft = planned_config(hf_config, settings)
    check_lesson(train, draft)
    check_drafted(target, draft)
    dtype = cached_dtype(target) or DTYPES[target.dtype] or torch.bfloat16  # which the GPUs to plan for compute in
    run = PlannedRun(target, hf_config, draft, train, optim, cluster, data.row_tokens, ranks, dtype)
    parallel = chosen(parallel, ranks, cluster.node_of(ranks), run.fits)
    check_placement(target, hf_config, parallel.target, parallel.target_shard_size_of(ranks))
    notes = check_planned_start(train, draft, target, hf_config)
    for note in [*notes, *check_planned_data(target, data, hf_config, elsewhere=cluster.gpus is not None)]:
        warnings.warn(note, stacklevel=1)
    cost = run.cost(parallel)
    tell_unserved(draft)
    tell_idle(train, optim, data, draft)
    lines = text(cost, train, optim, cluster, advice(cost, parallel, train, cluster))
    if train.minutes is None and cluster.gpus is not None:  # a job for other machines
        return lines
    device = resolve_device(config.device)
    here = steps_here(train, sum(cost.timed_flops(device).values()), draft, optim, device)
    return f"{lines}\n{here}"


def advice(cost: CostEstimate, parallel: ParallelConfig, train: TrainConfig, cluster: ClusterConfig) -> list[str]:
    """Changes that make a run fit, the cheapest first; none for a run that fits."""
    over = sum(cost.memory.values()) - cluster.room
    if over <= 0:
        return []
    found = []
    weights, states = cost.memory["target's weights"], cost.memory["draft's weights, gradients and optimiser"]
    passing = sum(cost.memory.values()) - weights - states
    if train.micro_batch_rows > 1 and passing > over / 2:
        rows = train.micro_batch_rows  # of which a divisor keeps a step a whole number of micro-batches
        fewer = max(each for each in range(1, rows // 2 + 1) if rows % each == 0)
        found.append(f"train.micro_batch_rows={fewer} (accumulation makes up for it)")
    if not parallel.activation_checkpointing and cost.memory["draft's activations"] > over / 2:
        found.append("parallel.activation_checkpointing=true (the draft's layers cost a third more)")
    in_fp8 = train.target_quant == "fp8"
    if parallel.target == "replicated" and weights > over / 2:
        more = (" with train.target_quant=none" if in_fp8 else "") + ("" if cost.gpus > 1 else ", on more GPUs")
        found.append(f"parallel.target=fsdp2, or tensor within a node{more}")
    elif parallel.target != "replicated" and weights > over / 2:
        found.append("more GPUs, or a larger parallel.target_shard_size")
    if states > over / 2 and parallel.backend in ("single", "ddp"):
        found.append("parallel=fsdp2" + ("" if cost.gpus > 1 else ", on more GPUs"))
    if parallel.backend == "fsdp2" and parallel.reshard_after_forward is False:
        found.append("parallel.reshard_after_forward=true (layers are gathered again for the backward pass)")
    if states > over / 2 and parallel.backend == "fsdp2" and parallel.draft_shard_size_of(cost.gpus) < cost.gpus:
        found.append("parallel.draft_shard_size=world")
    if states > over / 2 and not parallel.offload_optimizer and parallel.backend in ("fsdp2", "deepspeed"):
        found.append("parallel.offload_optimizer=true")
    return found or ["more GPUs, or GPUs with more memory"]


def text(cost: CostEstimate, train: TrainConfig, optim: OptimConfig, cluster: ClusterConfig, changes: list[str]) -> str:
    """The estimate as lines to read."""
    total = sum(cost.memory.values())
    all_flops = sum(cost.flops.values())
    target, steps = cost.target, train.steps or int(cost.seconds * cost.tokens_per_s / optim.tokens_per_step)
    run = f"{steps:,} steps of {optim.tokens_per_step:,} tokens"
    width = max(map(len, [*cost.flops, *cost.memory])) + 2
    lines = [
        f"target: {count_in_words(target.parameters)} parameters, "
        + ("no layers" if cost.reads else f"of its layers {count_in_words(target.active)} for a token"),
        f"draft: {count_in_words(cost.draft_parameters)} parameters",
        *cost.layout,
        "",
        "GFLOP a token",
        *(f"  {part:<{width}}{each / 1e9:10.3f}  {each / all_flops:4.0%}" for part, each in cost.flops.items() if each),
        f"  {'all':<{width}}{all_flops / 1e9:10.3f}",
        "",
        f"memory on each of {cost.gpus} GPUs" + (f", and {in_words(cost.host)} of its host" if cost.host else ""),
        *(f"  {part:<{width}}{in_words(value):>14}" for part, value in cost.memory.items()),
        f"  {'all, at most':<{width}}{in_words(total):>14}  of {cluster.memory_gib:g} GiB"
        + ("" if not changes else f": does not fit below {USABLE:.0%}"),
        *(f"  try {change}" for change in changes),
        "",
        f"on these GPUs, at {cluster.mfu:.0%} of {cluster.tflops:g} TFLOP/s each: {cost.tokens_per_s:,.0f} tokens/s",
        f"{run}: {time_in_words(cost.seconds)}, {time_in_words(cost.seconds * cost.gpus)} of GPUs",
        *_offline(cost, cluster),
    ]
    return "\n".join(lines)


def _offline(cost: CostEstimate, cluster: ClusterConfig) -> list[str]:
    """What there is to say of the target's states on disk."""
    if cost.offline is None:
        return []
    nodes = cost.gpus // cluster.node_of(cost.gpus)
    disk = f"at {cluster.disk_gib_s:g} GiB/s" + (f" on each of {nodes} nodes" if nodes > 1 else "")
    return [cost.offline.reading(disk) if cost.reads else cost.offline.advice(disk)]
