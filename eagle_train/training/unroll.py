"""The draft unrolled on its own features, for every slot at once: what drafting will do, without an engine.

Pass 1 is the draft on the target's hidden states. In pass k slot j gets the hidden state that pass k-1 put out at slot
j-1, and sees what a chain rooted at slot j-k+1 would see: pass 1 up to its root, then pass 2, 3, ... k, one slot each.
The tokens fed are the document's own (so did HASS, arXiv 2408.15766). Knows nothing of losses or optimisers.

Shapes: B rows, T tokens, H hidden; Q, K, D as in ops.attention.
"""

from collections.abc import Callable

import torch

from eagle_train.models.draft import Draft
from eagle_train.ops.attention import Attend, Rule, additive, merge, packed_attention, plain_partial

Keys = tuple[torch.Tensor, torch.Tensor]


def unroll(
    draft: Draft,
    embeddings: torch.Tensor,
    previous: torch.Tensor,
    positions: torch.Tensor,
    lengths: list[list[int]],
    passes: int,
) -> list[torch.Tensor]:
    """Each pass's hidden states [B, T, H]; entry k-1 predicts at slot j what a chain's depth k would there.

    `embeddings`, `previous` (the hidden state each slot is paired with), `positions` and `lengths` as for a packed
    forward. In pass k the first k-1 slots of a document have no chain of that depth: what is there means nothing.
    """
    seen: list[dict[int, Keys]] = [{}]
    states = [draft(embeddings, previous, positions, recording(packed_attention(lengths), seen[0]))]
    for _ in range(1, passes):
        seen.append({})
        attend = chained(seen, positions, lengths)
        states.append(draft(embeddings, states[-1].roll(1, dims=1), positions, attend))
    return states


def recording(attend: Attend, kept: dict[int, Keys]) -> Attend:
    """`attend`, and the keys and values it was given stay in `kept`."""

    def wrapped(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        kept[layer] = (k, v)
        return attend(layer, q, k, v, rule)

    return wrapped


def chained(seen: list[dict[int, Keys]], positions: torch.Tensor, lengths: list[list[int]]) -> Attend:
    """`attend` of pass k = len(seen): the documents' pass 1 up to each chain's root, then one slot of each pass."""
    behind = len(seen) - 1  # how far a chain's root lies behind its last slot
    documents = torch.repeat_interleave(
        torch.arange(sum(map(len, lengths)), device=positions.device),
        torch.tensor([length for row in lengths for length in row], device=positions.device),
    ).view(positions.shape)
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    distance = positions.unsqueeze(2) - positions.unsqueeze(1)
    rooted = same & (distance >= behind)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        seen[-1][layer] = (k, v)
        mask = rooted & rule.sees(positions.unsqueeze(2), positions.unsqueeze(1))
        total = plain_partial(q, *seen[0][layer], additive(mask.unsqueeze(1)), rule)
        for steps, kept in enumerate(reversed(seen[1:])):
            near = rule.sees(positions, positions - steps).expand_as(positions)
            total = merge(total, single_key(q, *(x.roll(steps, dims=2) for x in kept[layer]), near, rule))
        return total[0].to(q.dtype)

    return attend


def single_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over one key, its own: [B,Q,T,D] and the log-sum-exp [B,Q,T]. `seen` bool [B,T]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    score = (q * k).sum(-1).float() * rule.scale
    return v, score.masked_fill(~seen.unsqueeze(1), -torch.inf)


def chain_acceptance(
    states: list[torch.Tensor],
    best: torch.Tensor,
    choose: Callable[[torch.Tensor], torch.Tensor],
    supervised: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many simulated chains held down to each depth, and how many there were: two float tensors [depth].

    `best` [B, T] is the target's choice at each slot, `choose` gives the draft's for hidden states [B, T, H]. A chain
    counts when all its slots are supervised, so all depths count the same chains but for those at a document's end.
    """
    held = possible = torch.ones_like(supervised)
    accepted, chains = [], []
    for depth, state in enumerate(states):
        if depth > 0:  # a chain at slot j goes on from slot j-1
            held, possible = held.roll(1, dims=1), possible.roll(1, dims=1)
        possible = possible & supervised & (positions >= depth)
        held = held & possible & (choose(state) == best)
        accepted.append(held.sum())
        chains.append(possible.sum())
    return torch.stack(accepted).double(), torch.stack(chains).double()
