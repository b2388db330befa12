"""The draft unrolled on its own features, for every slot at once, as drafting will run it, without an engine.

Pass 1 runs the draft on the target's hidden states. In pass k, slot j is fed the hidden state that pass k-1 predicted
at slot j-1, and attends to what a chain rooted at slot j-k+1 has: pass 1 up to its root, then passes 2, 3, ... k, one
slot each. The tokens fed are the document's own (as in HASS, arXiv 2408.15766). Knows nothing of losses or optimisers.

Shapes: B rows, T tokens, H hidden; Q, K, D as in ops.attention.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from eagle_train.ops.attention import Attend, Rule, additive_mask, merge, packed_attention, plain_partial

_Keys = tuple[torch.Tensor, torch.Tensor]


def unroll(
    draft: Callable[..., torch.Tensor],
    embeddings: torch.Tensor,
    previous: torch.Tensor,
    positions: torch.Tensor,
    lengths: list[list[int]],
    passes: int,
) -> list[torch.Tensor]:
    """The hidden states [B, T, H] of each pass: those of pass k at slot j are what a chain predicts there at depth k.

    `draft` has the signature of `Draft.forward`. `embeddings` [B, T, H] of the tokens, `previous` [B, T, H]: the hidden
    state that each slot is paired with; `positions` [B, T] within documents, `lengths` of each row's documents. In pass
    k the first k-1 slots of a document, counted from the draft's first, have no chain of that depth; their values are
    meaningless.
    """
    seen: list[dict[int, _Keys]] = [{}]
    first = packed_attention(lengths)
    states = [draft(embeddings, previous, positions, _recording(first, seen[0]) if passes > 1 else first)]
    for _ in range(1, passes):
        own: dict[int, _Keys] = {}
        attend = _chained(list(seen), own, positions, lengths)
        states.append(draft(embeddings, states[-1].roll(1, dims=1), positions, attend))
        seen.append(own)
    return states


def _recording(attend: Attend, kept: dict[int, _Keys]) -> Attend:
    """`attend` that also stores the keys and values it is given in `kept`, by layer."""

    def wrapped(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        kept[layer] = (k, v)
        return attend(layer, q, k, v, rule)

    return wrapped


def _chained(
    seen: list[dict[int, _Keys]], own: dict[int, _Keys], positions: torch.Tensor, lengths: list[list[int]]
) -> Attend:
    """`attend` of the next pass: over pass 1 up to each chain's root, then over one slot of each later pass.

    `seen`: the keys and values of the passes before; this pass's are stored in `own`. `seen` is not changed
    afterwards, because a layer may be recomputed after later passes have run.
    """
    behind = len(seen)  # slots from a chain's root to its last slot

    @torch.compiler.disable  # as packed_attention's
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        own[layer] = (k, v)
        total = _rooted_attention(q, *seen[0][layer], behind, lengths, rule)
        for steps, kept in enumerate([own, *reversed(seen[1:])]):
            near = rule.sees(positions, positions - steps).expand_as(positions)
            keys, values = (x.roll(steps, dims=2) for x in kept[layer])
            total = merge(total, _single_key(q, keys, values, near, rule))
        return total[0].to(q.dtype)

    return attend


def _rooted_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, behind: int, lengths: list[list[int]], rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention within each document to keys at least `behind` slots back: [B,Q,T,D], and its log-sum-exp [B,Q,T]."""
    batch, _, length, _ = q.shape
    flat = [document for row in lengths for document in row]
    pieces = (x.transpose(0, 1).flatten(1, 2).unsqueeze(0).split(flat, dim=2) for x in (q, k, v))
    parts = []
    for size, queries, keys, values in zip(flat, *pieces, strict=True):
        blind = min(behind, size)  # the first slots have no root
        slots = torch.arange(blind, size, device=q.device).unsqueeze(1)
        roots = torch.arange(size - blind, device=q.device)
        mask = additive_mask((slots - behind >= roots) & rule.sees(slots, roots))[None, None]
        out, lse = plain_partial(
            queries[:, :, blind:], keys[:, :, : size - blind], values[:, :, : size - blind], mask, rule
        )
        parts.append((F.pad(out, (0, 0, blind, 0)), F.pad(lse, (blind, 0), value=-math.inf)))
    whole = (torch.cat(part, dim=2) for part in zip(*parts, strict=True))
    out, lse = (x.squeeze(0).unflatten(1, (batch, length)).transpose(0, 1) for x in whole)
    return out, lse


def _single_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query to the one key at its slot: [B,Q,T,D], and the log-sum-exp [B,Q,T]. `seen` bool [B,T]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    score = (q * k).sum(-1).float() * rule.scale
    return v, score.masked_fill(~seen.unsqueeze(1), -torch.inf)
