"""Prefill: the forwards of target and drafter over prompts, whole or in chunks.

Paper sections 3 (stage 1) and 3.3; DESIGN sections 3.1, 3.6. Knows nothing of requests or sampling. Shapes: A active
rows, T tokens of the longest text, H hidden.
"""

import torch

from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
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
    """Run texts, each behind its prefix, through the target and then the drafter; fills both caches.

    `texts`: token ids. `before` [A, H]: the target's hidden states at the prefixes' last tokens; None where all
    prefixes are empty. Returns the target's hidden states [A, T, H], padded on the right: by causality no token sees
    the padding.
    """
    device = prefix.lengths.device
    longest = max(len(text) for text in texts)
    tokens = to_device([text + [0] * (longest - len(text)) for text in texts], device)
    positions = prefix.lengths.unsqueeze(1) + torch.arange(longest, device=device)
    hidden = target.hidden_states(tokens, positions, cache.extend(prefix, positions))
    if drafter is not None:
        drafter.prefill(prefix, tokens, positions, hidden, before)
    return hidden
