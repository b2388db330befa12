"""Prefill: the prompts' keys, values and first tokens. Paper sections 3 (stage 1) and 3.3; DESIGN sections 3.1, 3.6."""

import torch

from eagle_train.inference.kv_cache import KVCache
from eagle_train.models.draft import Draft, shift_hidden
from eagle_train.models.target import Target


def prefill(
    target: Target,
    draft: Draft | None,
    target_cache: KVCache,
    draft_cache: KVCache | None,
    rows: torch.Tensor,
    prompts: list[list[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run whole prompts through target and draft, into the caches' `rows` [A].

    Returns the last prompt token's hidden state [A, H], which the first draft slot needs, and its logits [A, V], from
    which the first token is sampled at once. Prompts are padded on the right: nothing real sees the padding.
    """
    device = rows.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    hidden = target.hidden_states(tokens, positions, target_cache.fresh(rows, longest))
    if draft is not None:
        previous = shift_hidden(hidden, positions, draft.config.first_token)
        draft(target.embed(tokens), previous, positions, draft_cache.fresh(rows, longest))
    last = hidden[torch.arange(len(prompts), device=device), lengths - 1]
    return last, target.lm_head(last)
