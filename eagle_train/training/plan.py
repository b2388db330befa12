"""What a run will cost, said before any weight is loaded: FLOPs, memory of each GPU, hours. `plan=true`.

Knows shapes and settings, no weights and no data: it takes every token for supervised and rows for one document each,
so it says the most that a step can take. Kernels' workspaces and an allocator's gaps are not in it.

Measured (tests/training/test_plan.py): what the tensors of one process's real steps hold at their peak, within 5 % of
what is said here, part by part; and on two ranks what FSDP2's steps hold of a draft, within 5 %. All else is formula:
DDP's and DeepSpeed's buckets, a divided or offloaded target, the host's memory.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.corpus.source import DataConfig
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.draft_config import widest
from eagle_train.models.family import skeleton
from eagle_train.models.forward import decoder_of
from eagle_train.models.head import head_of
from eagle_train.models.loading import DTYPES, TargetConfig, load_config
from eagle_train.models.quantisation import quantisation_of
from eagle_train.models.shapes import heads_of
from eagle_train.settings import build
from eagle_train.training.assemble import check_job, check_planned_data
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.forecast import steps_here
from eagle_train.training.losses import default_chunk_rows
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.trainer import TrainConfig

GIB = 2**30
CONTEXT_GIB = 1.0  # what CUDA and its libraries take before anything is done
ZERO_BUCKET, ZERO_LIVE = 5 * 10**8, 10**9  # numbers: DeepSpeed's reduce_bucket_size, stage3_max_live_parameters
ROOM = 0.92  # of a GPU's memory: the rest is lost between blocks


@dataclass
class ClusterConfig:
    """The GPUs to plan for; the defaults are H100s (80 GB, 989 dense bf16 TFLOP/s, NVIDIA's data sheet).

    `gpus`: how many, None for as many as there are processes. `mfu`: the share of their FLOP/s that the job will reach.
    """

    gpus: int | None = None
    memory_gib: float = 80.0
    tflops: float = 989.0
    mfu: float = 0.4

    def __post_init__(self) -> None:
        check(self.gpus is None or self.gpus >= 1, f"cluster.gpus={self.gpus}: must be at least 1, or null")
        for key in ("memory_gib", "tflops"):
            check(getattr(self, key) > 0, f"cluster.{key}={getattr(self, key)}: must be above 0")
        check(0 < self.mfu <= 1, f"cluster.mfu={self.mfu}: must be above 0 and at most 1")


@dataclass(frozen=True)
class TargetShape:
    """What a target's config says of its cost. `active`: its decoder's weights that a token is multiplied with."""

    parameters: int
    active: int
    largest_layer: int
    layers: int
    hidden: int
    vocabulary: int
    attention: int  # query heads * head_dim
    intermediate: int  # of the experts that a token goes through together
    tied: bool
    bits: float | None = None  # of a layer's weight where the checkpoint is quantised, its scales included

    @classmethod
    def of(cls, config: Any, trust_remote_code: bool = False, place: str = "target") -> "TargetShape":
        """Counted on the model built without memory for its weights. `place` begins the message of a UserError."""
        model = skeleton(config, trust_remote_code, place)
        text = config.get_text_config()
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((count for name in names if (count := getattr(text, name, None))), 1)
        numbers = (getattr(text, name, None) for name in ("num_experts_per_tok", "top_k_experts"))
        chosen = min(experts, max(map(widest, filter(None, numbers)), default=1))  # some say it for each layer
        ends = {id(model.get_input_embeddings().weight), id(head_of(model).weight)}
        looked_up = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        ours = {id(parameter) for parameter in decoder_of(model).parameters()} - ends - looked_up  # no vision tower's
        active, layers = 0.0, {}
        for name, parameter in model.named_parameters():
            if id(parameter) not in ours:
                continue
            number = next((part for part in name.split(".") if part.isdigit()), None)
            layers[number] = layers.get(number, 0) + parameter.numel()
            if parameter.ndim >= 2:
                active += parameter.numel() * (chosen / experts if ".experts." in name else 1)
        heads = [heads_of(text, layer) for layer in range(text.num_hidden_layers)]
        return cls(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            active=round(active),
            largest_layer=max(layers.values()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            vocabulary=text.vocab_size,
            attention=max(each.queries * each.width for each in heads),
            intermediate=(widest(getattr(text, "intermediate_size", None)) or 0) * chosen,
            tied=len(ends) == 1,
            bits=bits_of(quantisation_of(config)),
        )


def bits_of(quantisation: Any) -> float | None:
    """How many bits a checkpoint's quantisation leaves a weight, a 16-bit scale for every 64 among them."""
    if not quantisation:
        return None
    groups = (group.get("weights") or {} for group in (quantisation.get("config_groups") or {}).values())
    said = [quantisation.get("bits"), *(weights.get("num_bits") for weights in groups)]
    small = quantisation.get("load_in_4bit") or "fp4" in str(quantisation.get("quant_method")) or 4 in said
    return (4 if small else 8) + 16 / 64


@dataclass(frozen=True)
class Plan:
    """`flops`: of a token, by part. `memory`: bytes on a GPU, by part. `host`: bytes in its host's memory."""

    target: TargetShape
    draft_parameters: int
    flops: Mapping[str, float]
    memory: Mapping[str, float]
    host: float
    gpus: int
    tokens_per_s: float
    seconds: float


def planned(config: DictConfig, ranks: int) -> str:
    """The plan for a composed config and a job of `ranks` processes, or of `cluster.gpus`, as lines to read.

    Raises UserError for a job that could not start.
    """
    cluster = build(ClusterConfig, config.cluster, "cluster")
    train, optim = build(TrainConfig, config.train, "train"), build(OptimConfig, config.optim, "optim")
    parallel, data = build(ParallelConfig, config.parallel, "parallel"), build(DataConfig, config.data, "data")
    target = build(TargetConfig, config.target, "target")
    ranks = cluster.gpus or ranks
    hf_config = load_config(target)
    check_job(train, optim, parallel, data, target, hf_config, ranks, config.device)
    for note in check_planned_data(target, data, hf_config):
        warnings.warn(note, stacklevel=1)
    shape = {key: value for key, value in OmegaConf.to_container(config.draft).items() if value is not None}
    draft = DraftConfig.from_target(hf_config, **shape)
    dtype = DTYPES[target.dtype] or torch.bfloat16  # which the GPUs to plan for compute in
    cost = plan(
        TargetShape.of(hf_config, target.trust_remote_code, f"target.path={target.path}"),
        draft,
        train,
        optim,
        parallel,
        cluster,
        data.row_tokens,
        ranks,
        dtype,
        target,
    )
    lines = text(cost, train, optim, cluster, advice(cost, parallel, train, cluster))
    if train.minutes is None and cluster.gpus is not None:  # a job for other machines
        return lines
    here = steps_here(train, sum(cost.flops.values()), draft, optim, resolve_device(config.device))
    return f"{lines}\n{here}"


def plan(
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
) -> Plan:
    """The cost of a job of `ranks` processes, a GPU each; `loaded` says what of the target is offloaded."""
    with torch.device("meta"):
        module = Draft(draft)
    recomputed = parallel.activation_checkpointing
    flops = flops_of(target, draft, module, row_tokens, recomputed, train.unroll)
    tokens_per_s = ranks * cluster.tflops * 1e12 * cluster.mfu / sum(flops.values())
    tokens = train.micro_batch_rows * row_tokens
    accumulated = optim.tokens_per_step > tokens * ranks
    weights, host = draft_state(module, optim, parallel, ranks, dtype, accumulated)
    of_target = tokens * dtype.itemsize * target_activations(target, parallel, ranks)
    kept, again = (tokens * each for each in activations(draft, dtype, recomputed, train.unroll, row_tokens))
    states, chunk = loss_memory(target, draft, tokens, dtype, train.unroll)
    of_draft, of_loss = kept + max(0, again - chunk), states + chunk  # the loss is over when a layer runs again
    memory = {
        "target's weights": target_weights(target, parallel, ranks, dtype),
        "draft's weights, gradients and optimiser": weights,
        "draft's activations": of_draft,
        "hidden states and the loss": of_loss,
        "target's activations beyond these": max(0, of_target - of_draft - of_loss),  # gone when these come
        "CUDA": CONTEXT_GIB * GIB,
    }
    if loaded and loaded.offload:  # the rest waits in the host's memory
        left = ROOM * cluster.memory_gib * GIB - sum(memory.values()) + memory["target's weights"]
        room = left if loaded.device_gib is None else loaded.device_gib * GIB
        fits = max(0.0, min(memory["target's weights"], room))
        host += memory["target's weights"] - fits
        memory["target's weights"] = fits
    return Plan(
        target,
        module.num_parameters,
        flops,
        memory,
        host,
        ranks,
        tokens_per_s,
        60 * train.minutes if train.steps is None else train.steps * optim.tokens_per_step / tokens_per_s,
    )


def flops_of(
    target: TargetShape, draft: DraftConfig, module: Draft, context: int, recomputed: bool, unroll: int = 1
) -> dict[str, float]:
    """Multiplications and additions in the products of one token, by part; attention to half of a row on average.

    The LM head is multiplied with the target's states, with the draft's, and with the gradient for these, in each of
    `unroll` passes. The draft's backward pass costs its forward twice; `fc` needs a gradient for its inputs only where
    these are the draft's own.
    """
    seen = context / 2
    fc = module.fc.weight.numel()
    layers = sum(parameter.numel() for parameter in module.layers.parameters() if parameter.ndim >= 2)
    if draft.ffn == "moe":
        layers = sum(p.numel() for n, p in module.layers.named_parameters() if p.ndim >= 2 and ".experts" not in n)
        layers += draft.num_layers * 3 * draft.hidden_size * draft.intermediate_size
    attention = 4 * seen * draft.num_heads * draft.head_dim * draft.num_layers
    passes = 4 if recomputed else 3
    return {
        "target": 2 * target.active + 4 * seen * target.attention * target.layers,
        "LM head, for target and draft": unroll * 3 * 2 * (draft.vocab_size or target.vocabulary) * target.hidden,
        "draft": (3 * unroll - 1) * 2 * fc + unroll * passes * (2 * layers + attention),
    }


def target_weights(target: TargetShape, parallel: ParallelConfig, ranks: int, dtype: torch.dtype) -> float:
    """A rank's part of the target; embedding and LM head are whole beside it, and FSDP2 gathers two layers at once."""
    ends = dtype.itemsize * target.vocabulary * target.hidden * (1 if target.tied else 2)
    each = dtype.itemsize if target.bits is None else target.bits / 8
    whole = ends + each * (target.parameters - ends / dtype.itemsize)
    if parallel.target == "replicated":
        return whole
    gathered = 2 * each * target.largest_layer if parallel.target == "fsdp2" else 0
    return whole / min(parallel.share or ranks, ranks) + ends + gathered


def target_activations(target: TargetShape, parallel: ParallelConfig, ranks: int) -> float:
    """Numbers of a rank's token that exist at once in the target's forward, which keeps none.

    Ranks of a tensor-parallel target run all their tokens together, each with its part of the heads and the middle.
    """
    share = min(parallel.share or ranks, ranks) if parallel.target == "tensor" else 1
    return 4 * target.hidden * share + 2 * target.attention + 3 * target.intermediate


def draft_state(
    module: Draft,
    optim: OptimConfig,
    parallel: ParallelConfig,
    ranks: int,
    dtype: torch.dtype,
    accumulated: bool = False,
) -> tuple[float, float]:
    """Bytes of the draft's fp32 weights and gradients, its optimiser's state, and what it computes with in `dtype`: on
    a GPU, on a host. `accumulated`: over several micro-batches, through which FSDP2 keeps gradients undivided.

    AdamW keeps two numbers of a weight, Muon one of a matrix's.
    """
    size = module.num_parameters
    matrices = sum(parameter.numel() for parameter in module.parameters() if parameter.ndim >= 2)
    state = 8 * size - (4 * matrices if optim.name == "muon" else 0)
    copy = dtype.itemsize * size if dtype != torch.float32 else 0
    stage = parallel.zero.get("stage", 2) if parallel.backend == "deepspeed" else 0
    sharded = parallel.backend == "fsdp2"
    parts = {  # bytes, and whether the ranks divide them
        "weights": (4 * size, sharded or stage >= 1),
        "gradients": (4 * size, (sharded and not accumulated) or stage >= 2),
        "state": (state, sharded or stage >= 1),
        "copy": (gathered(module, dtype) if sharded else copy, stage == 3),
    }
    bytes_of = {name: amount / (ranks if divided else 1) for name, (amount, divided) in parts.items()}
    if parallel.backend == "ddp":
        bytes_of["buckets"] = 4 * size
    if stage == 3:
        bucket = parallel.zero.get("reduce_bucket_size", ZERO_BUCKET)
        live = min(size, parallel.zero.get("stage3_max_live_parameters", ZERO_LIVE))
        # In the step, when nothing is gathered, the rank's gradients are there twice more.
        bytes_of["gathered"] = dtype.itemsize * bucket + max(dtype.itemsize * live, 8 * size / ranks)
    host = 0.0
    if parallel.offload_optimizer:
        host = bytes_of.pop("weights") + bytes_of.pop("state")
    return sum(bytes_of.values()), host


def gathered(module: Draft, dtype: torch.dtype) -> int:
    """Bytes that FSDP2's backward pass holds of the whole draft: what is in no layer throughout; a layer and the one
    that is fetched for the next; a layer's gradients in `dtype`, and in fp32 as they are about to be added up."""
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in module.layers]
    ends, layer = module.num_parameters - sum(layers), max(layers)
    return dtype.itemsize * (ends + min(2, len(layers)) * layer + layer) + 4 * layer


def activations(
    draft: DraftConfig, dtype: torch.dtype, recomputed: bool, unroll: int = 1, document: int = 0
) -> tuple[int, int]:
    """Bytes a token leaves for the draft's backward pass, and those of a layer that runs again in it.

    A layer's: what its two norms read, in fp32, and what they write; queries, keys, values, attention's output and the
    same in rows; the gate before and behind its activation, the other half, their product. A pass behind the first
    keeps its scores in fp32 besides, for a `document` of so many tokens, before and behind exp, rounded for the product
    with the values, and what merges them with one key of each pass.
    """
    own, exact = dtype.itemsize, 4
    heads, kv = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    layer = 2 * exact * draft.hidden_size
    layer += own * (2 * draft.hidden_size + 3 * heads + 2 * kv + 4 * draft.intermediate_size)
    scores = draft.num_heads * document * (2 * exact + (own if own < exact else 0))
    passes = [layer, *(layer + scores + 6 * own * heads * merged for merged in range(1, unroll))]
    ends = 2 * own * draft.hidden_size * unroll
    if recomputed:
        return own * draft.hidden_size * draft.num_layers * unroll + ends, max(passes)
    return draft.num_layers * sum(passes) + ends, 0


def loss_memory(
    target: TargetShape, draft: DraftConfig, tokens: int, dtype: torch.dtype, unroll: int = 1
) -> tuple[float, float]:
    """Two micro-batches' hidden states with, for each pass, fp32 copies and a gradient; and a chunk's logits: of
    both models in the head's dtype and in fp32, and their product."""
    states = tokens * target.hidden * (2 * dtype.itemsize + unroll * (dtype.itemsize + 4 * 4))
    vocabulary = draft.vocab_size or target.vocabulary
    copied = 0 if dtype == torch.float32 else 2 * 4
    chunk = default_chunk_rows(vocabulary) * vocabulary * (2 * dtype.itemsize + copied + 4)
    if draft.vocab_size:  # its head is a copy
        states += dtype.itemsize * vocabulary * target.hidden
    return states, chunk


def advice(plan: Plan, parallel: ParallelConfig, train: TrainConfig, cluster: ClusterConfig) -> list[str]:
    """What would make a run fit that does not, the cheapest first."""
    over = sum(plan.memory.values()) - ROOM * cluster.memory_gib * GIB
    if over <= 0:
        return []
    found = []
    weights, states = plan.memory["target's weights"], plan.memory["draft's weights, gradients and optimiser"]
    passing = sum(plan.memory.values()) - weights - states
    if train.micro_batch_rows > 1 and passing > over / 2:
        found.append(f"train.micro_batch_rows={max(1, train.micro_batch_rows // 2)} (accumulation makes up for it)")
    if not parallel.activation_checkpointing and plan.memory["draft's activations"] > over / 2:
        found.append("parallel.activation_checkpointing=true (the draft's layers cost a third more)")
    if parallel.target == "replicated" and weights > over / 2:
        found.append("parallel.target=fsdp2, or tensor within a node" + ("" if plan.gpus > 1 else ", on more GPUs"))
    elif parallel.target != "replicated" and weights > over / 2:
        found.append("more GPUs, or a larger parallel.share")
    if states > over / 2 and parallel.backend in ("single", "ddp"):
        found.append("parallel=fsdp2" + ("" if plan.gpus > 1 else ", on more GPUs"))
    if states > over / 2 and not parallel.offload_optimizer and parallel.backend in ("fsdp2", "deepspeed"):
        found.append("parallel.offload_optimizer=true")
    return found or ["more GPUs, or GPUs with more memory"]


def text(plan: Plan, train: TrainConfig, optim: OptimConfig, cluster: ClusterConfig, changes: list[str]) -> str:
    """The plan as lines to read."""
    total = sum(plan.memory.values())
    all_flops, hours = sum(plan.flops.values()), plan.seconds / 3600
    target, steps = plan.target, train.steps or int(plan.seconds * plan.tokens_per_s / optim.tokens_per_step)
    run = f"{steps:,} steps of {optim.tokens_per_step:,} tokens"
    width = max(map(len, [*plan.flops, *plan.memory])) + 2
    lines = [
        f"target: {target.parameters / 1e9:.4g} B parameters, of its layers {target.active / 1e9:.4g} B for a token",
        f"draft: {plan.draft_parameters / 1e9:.4g} B parameters",
        "",
        "GFLOP a token",
        *(f"  {part:<{width}}{value / 1e9:10.3f}  {value / all_flops:4.0%}" for part, value in plan.flops.items()),
        f"  {'all':<{width}}{all_flops / 1e9:10.3f}",
        "",
        f"GiB on each of {plan.gpus} GPUs" + (f", and {plan.host / GIB:.1f} of its host" if plan.host else ""),
        *(f"  {part:<{width}}{value / GIB:10.2f}" for part, value in plan.memory.items()),
        f"  {'all, at most':<{width}}{total / GIB:10.2f}  of {cluster.memory_gib:g}"
        + ("" if not changes else f": does not fit below {ROOM:.0%}"),
        *(f"  try {change}" for change in changes),
        "",
        f"on these GPUs, at {cluster.mfu:.0%} of {cluster.tflops:g} TFLOP/s each: {plan.tokens_per_s:,.0f} tokens/s",
        f"{run}: {hours:,.1f} hours, {hours * plan.gpus:,.1f} GPU-hours",
    ]
    return "\n".join(lines)
