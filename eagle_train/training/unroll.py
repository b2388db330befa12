"""The draft unrolled on its own features, for every slot at once: what drafting will do, without an engine.

Pass 1 is the draft on the target's hidden states. In pass k slot j gets the hidden state that pass k-1 put out at slot
j-1, and sees what a chain rooted at slot j-k+1 would see: pass 1 up to its root, then pass 2, 3, ... k, one slot each.
The tokens fed are the document's own (so did HASS, arXiv 2408.15766). Knows nothing of losses or optimisers.

Shapes: B rows, T tokens, H hidden; Q, K, D as in ops.attention.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

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
    forward. In pass k the first k-1 slots of a document, counted from the draft's first, have no chain of that depth:
    what is there means nothing.
    """
    seen: list[dict[int, Keys]] = [{}]
    first = packed_attention(lengths)
    states = [draft(embeddings, previous, positions, recording(first, seen[0]) if passes > 1 else first)]
    for _ in range(1, passes):
        attend = chained(list(seen), own := {}, positions, lengths)
        states.append(draft(embeddings, states[-1].roll(1, dims=1), positions, attend))
        seen.append(own)
    return states


def recording(attend: Attend, kept: dict[int, Keys]) -> Attend:
    """`attend`, and the keys and values it was given stay in `kept`."""

    def wrapped(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        kept[layer] = (k, v)
        return attend(layer, q, k, v, rule)

    return wrapped


def chained(
    seen: list[dict[int, Keys]], own: dict[int, Keys], positions: torch.Tensor, lengths: list[list[int]]
) -> Attend:
    """`attend` of the next pass: the documents' pass 1 up to each chain's root, then one slot of each pass.

    Its keys and values stay in `own`. A layer may be recomputed when later passes are done.
    """
    behind = len(seen)  # how far a chain's root lies behind its last slot

    @torch.compiler.disable  # as packed_attention's
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        own[layer] = (k, v)
        total = rooted_attention(q, *seen[0][layer], behind, lengths, rule)
        for steps, kept in enumerate([own, *reversed(seen[1:])]):
            near = rule.sees(positions, positions - steps).expand_as(positions)
            total = merge(total, single_key(q, *(x.roll(steps, dims=2) for x in kept[layer]), near, rule))
        return total[0].to(q.dtype)

    return attend


def rooted_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, behind: int, lengths: list[list[int]], rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention within each document to keys at least `behind` slots back, and its log-sum-exp: [B,Q,T,D], [B,Q,T]."""
    batch, _, length, _ = q.shape
    flat = [document for row in lengths for document in row]
    pieces = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(flat, dim=2) for x in (q, k, v))
    parts = []
    for size, queries, keys, values in zip(flat, *pieces, strict=True):
        blind = min(behind, size)  # the first slots, without a root
        slots = torch.arange(blind, size, device=q.device).unsqueeze(1)
        roots = torch.arange(size - blind, device=q.device)
        mask = additive((slots - behind >= roots) & rule.sees(slots, roots))[None, None]
        out, lse = plain_partial(
            queries[:, :, blind:], keys[:, :, : size - blind], values[:, :, : size - blind], mask, rule
        )
        parts.append((F.pad(out, (0, 0, blind, 0)), F.pad(lse, (blind, 0), value=-math.inf)))
    whole = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    out, lse = (x.squeeze(0).unflatten(1, (batch, length)).transpose(0, 1) for x in whole)
    return out, lse


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
