"""The draft unrolled on its own features, for every slot at once, as drafting will run it, without an engine.

Pass 1 runs the draft on the target's hidden states. In pass k, slot j is fed the hidden state that pass k-1 predicted
at slot j-1, and attends to what a chain rooted at slot j-k+1 has: pass 1 up to its root, then passes 2, 3, ... k, one
slot each. The tokens fed are the document's own (as in HASS, arXiv 2408.15766). Knows nothing of losses or optimisers.

Shapes: B rows, T tokens, H hidden; Q, K, D as in ops.attention.
"""

from collections.abc import Callable

import torch

from eagle_train.ops.attention import chained_attention, documents_by_reach, packed_attention
from eagle_train.ops.documents import Beside
from eagle_train.ops.rule import Attend, Rule

_Keys = tuple[torch.Tensor, torch.Tensor]


def unroll(
    draft: Callable[..., torch.Tensor],
    embeddings: torch.Tensor,
    previous: torch.Tensor,
    positions: torch.Tensor,
    lengths: list[list[int]],
    passes: int,
    first: Callable[..., torch.Tensor] | None = None,
    fed: Callable[[torch.Tensor], torch.Tensor] = lambda states: states,
) -> list[torch.Tensor]:
    """The states [B, T, W] of each pass: those of pass k at slot j are what a chain has there at depth k.

    `draft` has the signature of `Draft.forward`. `embeddings` [B, T, H] of the tokens, `previous` [B, T, ...]: what
    each slot is paired with in pass 1; `positions` [B, T] within documents, `lengths` of each row's documents. In pass
    k the first k-1 slots of a document, counted from the draft's first, have no chain of that depth; their values are
    meaningless. `first`: the forward of pass 1, where it is another one. `fed`: what of the states [B, T, W] the next
    slot is fed, [B, T, H].
    """
    seen: list[dict[int, _Keys]] = [{}]
    within = packed_attention(lengths)
    states = [(first or draft)(embeddings, previous, positions, _recording(within, seen[0]) if passes > 1 else within)]
    for _ in range(1, passes):
        own: dict[int, _Keys] = {}
        attend = _chained(list(seen), own, positions, lengths)
        states.append(draft(embeddings, fed(states[-1]).roll(1, dims=1), positions, attend))
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
    documents = documents_by_reach(lengths, behind)
    near: dict[tuple, list[torch.Tensor]] = {}

    def seen_from(rule: Rule) -> list[torch.Tensor]:
        """For so many steps back: whether the slot there is in reach, bool [B, T]."""
        if rule.reach not in near:
            near[rule.reach] = [rule.sees(positions, positions - back).expand_as(positions) for back in range(behind)]
        return near[rule.reach]

    @torch.compiler.disable  # as packed_attention's
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        own[layer] = (k, v)
        later, there = [own, *reversed(seen[1:])], seen_from(rule)
        beside = [Beside(*kept[layer], steps, there[steps]) for steps, kept in enumerate(later)]
        return chained_attention(q, *seen[0][layer], documents(rule), rule, beside)

    return attend
