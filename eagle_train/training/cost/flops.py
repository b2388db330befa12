"""FLOPs of a training token: multiplications and additions in the products of target, LM head and draft."""

from eagle_train.drafts import Draft, DraftConfig
from eagle_train.training.cost.target_shape import TargetShape


def flops_of(
    target: TargetShape, draft: DraftConfig, module: Draft, context: int, recomputed: bool, unroll: int = 1
) -> dict[str, float]:
    """Multiplications and additions in the products of one token, by part. A token of the target attends to half of a
    row of `context` tokens on average, one of the draft to what its layers see (`DraftConfig.seen`).

    In each of `unroll` passes the LM head is multiplied with the target's states, with the draft's, and with the
    gradient for these; of a draft that has its own, with the gradient for the head too. The draft's backward pass costs
    its forward twice, or three times where layers are `recomputed`. How often layers and `fc` are multiplied with is
    its kind's (`DraftConfig.layer_products`, `fc_products`).
    """
    seen = context / 2
    fc = draft.fc_inputs * draft.hidden_size
    layers = sum(parameter.numel() for parameter in module.layers.parameters() if parameter.ndim >= 2)
    experts = sum(p.numel() for name, p in module.layers.named_parameters() if ".experts" in name)
    if experts:  # a token goes through one of each layer's
        layers += draft.num_layers * 3 * draft.hidden_size * draft.intermediate_size - experts
    attention, vocabulary = 4 * draft.seen(context) * draft.attention_width, draft.vocab_size or target.vocabulary
    run = draft.layer_products(unroll, recomputed)
    return {
        "target": 2 * target.active + 4 * seen * target.attention * target.layers,
        "LM head, for target and draft": unroll * draft.head_products * 2 * vocabulary * target.hidden,
        "draft": draft.fc_products(unroll) * 2 * fc + run * (2 * layers + attention),
    }
