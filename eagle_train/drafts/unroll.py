"""The draft unrolled on its own features, for every slot at once, as drafting will run it, without an engine.

Pass 1 runs the draft on the target's hidden states. In pass k, slot j is fed the hidden state that pass k-1 predicted
at slot j-1, and attends to what a chain rooted at slot j-k+1 has: pass 1 up to its root, then passes 2, 3, ... k, one
slot each. The tokens fed are the document's own (as in HASS, arXiv 2408.15766).

Where what later passes are fed depends on no pass before, all passes are one call (`all_passes`): they attend alike.
Knows nothing of losses or optimisers.

Shapes: B rows, T tokens, H hidden; Q, K, D as in ops.attention.
"""

from collections.abc import Callable

import torch

from eagle_train.ops.attention import chained_attention, documents_by_reach, packed_attention
from eagle_train.ops.documents import Beside
from eagle_train.ops.rule import Attend, Rule, Uncompiled

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

    return Uncompiled(wrapped)


def _chained(
    seen: list[dict[int, _Keys]], own: dict[int, _Keys], positions: torch.Tensor, lengths: list[list[int]]
) -> Attend:
    """`attend` of the next pass: over pass 1 up to each chain's root, then over one slot of each later pass.

    `seen`: the keys and values of the passes before; this pass's are stored in `own`. `seen` is not changed
    afterwards, because a layer may be recomputed after later passes have run.
    """
    over = _OverChains(positions, lengths, behind=len(seen))

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        own[layer] = (k, v)
        return over(q, [kept[layer] for kept in (*seen, own)], rule)

    return Uncompiled(attend)


def all_passes(positions: torch.Tensor, lengths: list[list[int]], passes: int) -> Attend:
    """`attend` of all passes in one call: of q, k, v [B, heads, passes * T, D], pass after pass, each over what
    `unroll` has it see. `positions` int64 [B, T] within documents, `lengths` of each row's documents."""
    within = packed_attention(lengths)
    over = [_OverChains(positions, lengths, behind) for behind in range(1, passes)]

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        first, *later = q.chunk(passes, dim=2)
        pairs = list(zip(k.chunk(passes, dim=2), v.chunk(passes, dim=2), strict=True))
        out = [within(layer, first, *pairs[0], rule)]
        for behind, own in enumerate(later, 1):
            out.append(over[behind - 1](own, pairs[: behind + 1], rule))
        return torch.cat(out, dim=2)

    return Uncompiled(attend)


class _OverChains:
    """Attention of a pass whose slots are `behind` after their chains' roots: over pass 1 up to the root, then over one
    slot of each later pass, its own the last."""

    def __init__(self, positions: torch.Tensor, lengths: list[list[int]], behind: int):
        self._documents = documents_by_reach(lengths, behind)
        self._positions, self._behind = positions, behind
        self._near: dict[tuple, list[torch.Tensor]] = {}

    def __call__(self, q: torch.Tensor, passes: list[_Keys], rule: Rule) -> torch.Tensor:
        """Of q [B,Q,T,D], by the keys and values of the passes up to its own."""
        first, *later = passes
        there = self._seen_from(rule)
        beside = [Beside(*pair, steps, there[steps]) for steps, pair in enumerate(reversed(later))]
        return chained_attention(q, *first, self._documents(rule), rule, beside)

    def _seen_from(self, rule: Rule) -> list[torch.Tensor]:
        """For so many steps back: whether the slot there is in reach, bool [B, T]."""
        if rule.reach not in self._near:
            own = self._positions
            self._near[rule.reach] = [rule.sees(own, own - back).expand_as(own) for back in range(self._behind)]
        return self._near[rule.reach]
