"""Memory of one GPU in training, by part: weights, optimiser, activations, the loss. In bytes.

Knows shapes and settings. Every token is taken to be supervised and every row to be one document, so the numbers are
the most that a step takes. Kernels' workspaces and gaps between an allocator's blocks are not counted.
"""

import torch

from eagle_train.drafts import Draft, DraftConfig
from eagle_train.drafts.losses import default_chunk_rows
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.cost.target_shape import TargetShape
from eagle_train.training.optimizer import OptimConfig, by_muon

# DeepSpeed's defaults of reduce_bucket_size and stage3_max_live_parameters, in numbers.
_ZERO_BUCKET, _ZERO_LIVE = 5 * 10**8, 10**9


def target_weights(
    target: TargetShape, parallel: ParallelConfig, ranks: int, dtype: torch.dtype, in_fp8: bool = False
) -> float:
    """Bytes of a rank's part of the target. Embedding and LM head are whole on each rank, and FSDP2 gathers two layers
    at once. `in_fp8`: it computes so, which a target that is divided does not; each output has a scale in fp32.
    """
    ends = dtype.itemsize * target.vocabulary * target.hidden * (1 if target.tied else 2)
    each = target.bytes_of(dtype)
    whole = ends + each * (target.parameters - ends / dtype.itemsize)
    if parallel.target == "replicated":
        return whole - ((dtype.itemsize - 1) * target.rounded - 4 * target.rounded_rows if in_fp8 else 0)
    gathered = 2 * each * target.largest_layer if parallel.target == "fsdp2" else 0
    return whole / parallel.target_shard_size_of(ranks) + ends + gathered


def target_activations(target: TargetShape, parallel: ParallelConfig, ranks: int) -> float:
    """Numbers that exist at once for one token of a rank in the target's forward, which keeps none of them.

    Ranks of a tensor-parallel target run all their tokens together, each with its part of the heads and of the
    feed-forward.
    """
    together = parallel.target_shard_size_of(ranks) if parallel.target == "tensor" else 1
    return 4 * target.hidden * together + 2 * target.attention + 3 * target.intermediate


def draft_state(
    module: Draft,
    optim: OptimConfig,
    parallel: ParallelConfig,
    ranks: int,
    dtype: torch.dtype,
    accumulated: bool = False,
) -> tuple[float, float]:
    """Bytes of the draft's fp32 weights and gradients, of its optimiser's state, and of its copy in `dtype`: on a GPU,
    and on its host.

    `accumulated`: over several micro-batches, during which FSDP2 keeps gradients whole. FSDP2 divides over
    `parallel.draft_shard_size` ranks, DeepSpeed over all. AdamW keeps two numbers for
    each weight, Muon one for each weight of a matrix.
    """
    size = module.num_parameters
    matrices = sum(parameter.numel() for parameter in by_muon(module))
    state = 8 * size - (4 * matrices if optim.name == "muon" else 0)
    copy = dtype.itemsize * size if dtype != torch.float32 else 0
    stage = parallel.zero.get("stage", 2) if parallel.backend == "deepspeed" else 0
    sharded = parallel.backend == "fsdp2"
    parts = {  # bytes, and whether the ranks divide them
        "weights": (4 * size, sharded or stage >= 1),
        "gradients": (0 if sharded else 4 * size, stage >= 2),
        "state": (state, sharded or stage >= 1),
        "copy": (0 if sharded else copy, stage == 3),
    }
    over = parallel.draft_shard_size_of(ranks) if sharded else ranks
    bytes_of = {name: amount / (over if divided else 1) for name, (amount, divided) in parts.items()}
    if sharded:
        bytes_of["passing"] = _fsdp_passing(module, dtype, over, parallel.reshard_after_forward is False, accumulated)
    if stage < 3 and (sharded or stage or not copy):  # else the copy is their stack; ZeRO-3 runs them one by one
        bytes_of["experts' stacks"] = _stacks(module, dtype, parallel.activation_checkpointing)
    if parallel.backend == "ddp":
        bytes_of["buckets"] = 4 * size
    if stage == 3:
        bucket = parallel.zero.get("reduce_bucket_size", _ZERO_BUCKET)
        live = min(size, parallel.zero.get("stage3_max_live_parameters", _ZERO_LIVE))
        # In the step, when nothing is gathered, the rank's gradients are there twice more.
        bytes_of["gathered"] = dtype.itemsize * bucket + max(dtype.itemsize * live, 8 * size / ranks)
    host = 0.0
    if parallel.offload_optimizer:
        host = bytes_of.pop("weights") + bytes_of.pop("state")
    return sum(bytes_of.values()), host


def _stacks(module: Draft, dtype: torch.dtype, recomputed: bool) -> float:
    """Bytes of the experts' weights as grouped products read them (ops/grouped.py), kept for the backward pass: of all
    layers, or of one where layers are recomputed."""
    experts = sum(parameter.numel() for name, parameter in module.named_parameters() if ".experts." in name)
    return dtype.itemsize * experts / (len(module.layers) if recomputed else 1)


def _fsdp_passing(module: Draft, dtype: torch.dtype, over: int, kept_whole: bool, accumulated: bool) -> float:
    """Bytes of gradients and of what is gathered, at the most that FSDP2 holds of both together.

    Layers that are kept whole are all there when the backward pass begins, and go as it advances. Gradients come
    meanwhile, divided over so many ranks, or are there already, whole, where they are `accumulated`.
    """
    gradients = 4 * module.num_parameters / (1 if accumulated else over)
    late = fsdp_gathered(module, dtype) + gradients
    if not kept_whole:
        return late
    first = gradients if accumulated else 4 * max(_layer_sizes(module)) / over
    return max(late, fsdp_gathered(module, dtype, kept_whole=True) + first)


def _layer_sizes(module: Draft) -> list[int]:
    return [sum(parameter.numel() for parameter in layer.parameters()) for layer in module.layers]


def fsdp_gathered(module: Draft, dtype: torch.dtype, kept_whole: bool = False) -> int:
    """Bytes of whole tensors that FSDP2's backward pass holds of the draft.

    Throughout: what is in no layer. At its peak: a layer and the one prefetched, or, when it begins and layers were
    `kept_whole` since the forward pass, all; and a layer's gradients, in `dtype` and in fp32 for their reduction.
    """
    layers = _layer_sizes(module)
    ends, layer = module.num_parameters - sum(layers), max(layers)
    whole = sum(layers) if kept_whole else min(2, len(layers)) * layer
    return dtype.itemsize * (ends + whole + layer) + 4 * layer


def activations(draft: DraftConfig, dtype: torch.dtype, recomputed: bool, unroll: int = 1) -> tuple[int, int]:
    """Bytes that a token leaves for the draft's backward pass, and those of one layer that is recomputed in it, as its
    kind says them (`DraftConfig.kept_by_layer`, `passes_at_once`, `kept_beside_layers`)."""
    own = dtype.itemsize
    layer = draft.kept_by_layer(own)
    each_pass, once = draft.kept_beside_layers(own)
    ends = each_pass * unroll + once
    if recomputed:
        return own * draft.hidden_size * draft.num_layers * unroll + ends, layer * draft.passes_at_once(unroll)
    return draft.num_layers * unroll * layer + ends, 0


def loss_memory(
    target: TargetShape, draft: DraftConfig, tokens: int, dtype: torch.dtype, unroll: int = 1, device: str = "cuda"
) -> tuple[float, float]:
    """Bytes of hidden states, and of a chunk's logits, on a `device`.

    Two micro-batches' states of the target with, for each pass, what the loss makes of the draft's (`loss_bytes`).
    Logits of both models in the head's dtype, which a GPU's fused kernel turns into the gradient; on a CPU in fp32 too,
    and their product.
    """
    wanted = 1 + len(draft.target_layers)
    states = tokens * target.hidden * (2 * wanted * dtype.itemsize + unroll * draft.loss_bytes(dtype.itemsize))
    vocabulary = draft.vocab_size or target.vocabulary
    copied = 0 if device != "cpu" else 4 if dtype == torch.float32 else 3 * 4
    chunk = default_chunk_rows(vocabulary, device) * vocabulary * (2 * dtype.itemsize + copied)
    if draft.vocab_size:  # its head is a copy
        states += dtype.itemsize * vocabulary * target.hidden
    if draft.own_heads:  # a copy in `dtype` of one at a time, and the gradients of all
        states += (dtype.itemsize + 4 * draft.own_heads) * vocabulary * target.hidden
    return states, chunk
