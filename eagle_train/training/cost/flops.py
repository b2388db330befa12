"""FLOPs of a training token: multiplications and additions in the products of target, LM head and draft."""

from eagle_train.models.draft import Draft
from eagle_train.models.draft_config import DraftConfig
from eagle_train.training.cost.target_shape import TargetShape


def flops_of(
    target: TargetShape, draft: DraftConfig, module: Draft, context: int, recomputed: bool, unroll: int = 1
) -> dict[str, float]:
    """Multiplications and additions in the products of one token, by part. A token attends to half of a row of
    `context` tokens on average.

    In each of `unroll` passes the LM head is multiplied with the target's states, with the draft's, and with the
    gradient for these. The draft's backward pass costs its forward twice, or three times where layers are `recomputed`.
    `fc` needs a gradient for its inputs only where these are the draft's own.
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
