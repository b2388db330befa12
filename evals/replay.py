"""The train/serve check: the draft is run over finished answers as in training, and held against what serving found.

The first drafted token of a round is read off the target's own hidden states, so one packed forward over prompt and
answer must propose what the engine proposed there; where it does not, the two disagree on positions, norms or the
hidden state. Run over the file's own answers, the same forward tells how far those lie from what the target writes.
Knows nothing of questions or reports.
"""

from collections.abc import Iterable

import torch

from eagle_train.inference import Output
from eagle_train.models.draft import Draft, Head, shift_hidden
from eagle_train.models.target import Target
from eagle_train.ops.attention import packed_attention

Tokens = list[int]


@torch.inference_mode()
def proposals(
    target: Target, draft: Draft, prompt: Tokens, answer: Tokens, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What should follow each token of the answer but the last: the draft's k best [m - 1, k], the target's [m - 1]."""
    tokens = torch.tensor([prompt + answer], device=target.device)
    positions = torch.arange(tokens.shape[1], device=target.device)[None]
    attend = packed_attention([[tokens.shape[1]]])
    hidden = target.hidden_states(tokens, positions, attend)
    previous = shift_hidden(hidden, positions)
    drafted = draft(target.embed(tokens), previous, positions, attend)
    slots = slice(len(prompt), -1)
    head = Head(draft, target.lm_head)
    drafts = head.tokens(head.lm_head(drafted[0, slots]).topk(k).indices)
    return drafts, target.lm_head(hidden[0, slots]).argmax(-1)


def served_as_trained(
    target: Target, draft: Draft, served: Iterable[tuple[Tokens, Output]], k: int
) -> tuple[float, float]:
    """Two shares over these (prompt, output), of which at least one must have a round.

    First, the rounds whose first token is among the draft's k best. With k the number of the root's children that is
    what the engine counts as accepted at depth 1: at any temperature the target commits a drafted token exactly when it
    accepts it. Second, the `agreement` over all tokens.
    """
    held, agreed = [], []
    for prompt, output in served:
        if output.rounds:
            drafted, best = proposals(target, draft, prompt, output.token_ids, k)
            starts = torch.tensor([0, *output.rounds[:-1]], device=best.device).cumsum(0)
            followed = torch.tensor(output.token_ids[1:], device=best.device)
            held.append((drafted[starts] == followed[starts].unsqueeze(1)).any(1))
            agreed.append(drafted[:, 0] == best)
    return share(held), share(agreed)


def agreement(target: Target, draft: Draft, texts: Iterable[tuple[Tokens, Tokens]]) -> float | None:
    """Share of the tokens of these (prompt, answer) at which draft and target would go on alike; None without any."""
    agreed = []
    for prompt, answer in texts:
        if len(answer) > 1:
            drafted, best = proposals(target, draft, prompt, answer, 1)
            agreed.append(drafted[:, 0] == best)
    return share(agreed) if agreed else None


def share(hits: list[torch.Tensor]) -> float:
    return torch.cat(hits).double().mean().item()
