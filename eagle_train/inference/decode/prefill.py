"""Prefill: the prompts' keys, values and hidden states, at once or in chunks.

Paper sections 3 (stage 1) and 3.3; DESIGN sections 3.1, 3.6. Knows nothing of requests or sampling.
"""

import torch

from eagle_train.inference.cache.paged_kv import PagedKV, Prefix
from eagle_train.inference.drafters.drafter import Drafter
from eagle_train.models.target import Target
from eagle_train.ops.transfer import to_device


def prefill(
    target: Target,
    cache: PagedKV,
    drafter: Drafter | None,
    prefix: Prefix,
    texts: list[list[int]],
    before: torch.Tensor | None,
) -> torch.Tensor:
    """Run texts through the target, each after its `prefix`, and let the drafter read them.

    `before` [A, H] are the target's hidden states at the prefixes' last tokens, None where every prefix is empty.
    Returns those of the texts [A, T, H], padded on the right: nothing real sees the padding.
    """
    device = prefix.lengths.device
    longest = max(len(text) for text in texts)
    tokens = to_device([text + [0] * (longest - len(text)) for text in texts], device)
    positions = prefix.lengths.unsqueeze(1) + torch.arange(longest, device=device)
    hidden = target.hidden_states(tokens, positions, cache.extend(prefix, positions))
    if drafter is not None:
        drafter.prefill(prefix, tokens, positions, hidden, before)
    return hidden
