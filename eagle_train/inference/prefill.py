"""Prefill: the prompts' keys, values and first tokens. Paper sections 3 (stage 1) and 3.3; DESIGN sections 3.1, 3.6."""

import torch

from eagle_train.inference.drafting import Drafter
from eagle_train.inference.paged_kv import PagedKV, Prefix
from eagle_train.models.target import Target


def prefill(
    target: Target, cache: PagedKV, drafter: Drafter | None, prefix: Prefix, prompts: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run whole prompts through the target, into the blocks of an empty `prefix`, and let the drafter read them.

    Returns the last prompt token's hidden state [A, H], which the first draft slot needs, and its logits [A, V], from
    which the first token is sampled at once. Prompts are padded on the right: nothing real sees the padding.
    """
    device = prefix.lengths.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    hidden = target.hidden_states(tokens, positions, cache.fresh(prefix, longest))
    if drafter is not None:
        drafter.prefill(prefix, tokens, positions, hidden)
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    return last, target.lm_head(last)
