"""Prefill: the forwards of target and drafter over prompts, whole or in chunks.

Paper sections 3 (stage 1) and 3.3; DESIGN sections 3.1, 3.6. Knows nothing of requests or sampling. Shapes: A active
rows, T tokens of the longest text, S the width of the target's states.
"""

import torch

from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.drafters.drafters import Drafters, Seats
from eagle_train.ops.compiled import Forward
from eagle_train.ops.transfer import to_device


def prefill(
    forward: Forward,
    cache: PagedKV,
    drafters: Drafters,
    prefix: Prefix,
    texts: list[list[int]],
    before: torch.Tensor | None,
    seats: Seats,
) -> tuple[torch.Tensor, dict[int, str]]:
    """Run texts, each behind its prefix, through the target and then the drafters; fills all caches.

    `texts`: token ids. `before` [A, H]: the target's hidden states at the prefixes' last tokens; None where all
    prefixes are empty. Returns the target's hidden states [A, T, H], padded on the right: by causality no token sees
    the padding. Also the rows whose drafter is at fault, and why.
    """
    device = prefix.lengths.device
    counts = [len(text) for text in texts]
    longest = max(counts)
    tokens = to_device([text + [0] * (longest - len(text)) for text in texts], device)
    positions = prefix.lengths.unsqueeze(1) + torch.arange(longest, device=device)
    hidden = forward(tokens, positions, cache.extend(prefix, positions))
    return hidden, drafters.prefill(prefix, tokens, positions, hidden, before, counts, seats)
