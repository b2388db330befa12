"""Chains drafted slot by slot, written out plainly: the twin of `drafts/unroll.py`; and inputs for both."""

import torch

from eagle_train.drafts import Draft, shift_hidden
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.rule import Attend, Rule
from tests.support.tiny import shared_target, tiny_draft

PASSES = 4  # a root, then a chain of depth 1, 2, 3
LENGTHS = [[9, 4, 1, 6], [2, 18]]  # documents of two packed rows


def positions_of(lengths: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def documents(lengths: list[list[int]]) -> list[tuple[int, slice]]:
    """(row, place in the row) of every document."""
    ends = [torch.tensor(row).cumsum(0).tolist() for row in lengths]
    return [
        (row, slice(end - length, end))
        for row, places in enumerate(ends)
        for end, length in zip(places, lengths[row], strict=True)
    ]


def exact_draft(**kind) -> Draft:
    """In float64: a random draft's states grow from pass to pass, and rounding with them."""
    return tiny_draft(shared_target(), **kind).double()


def draft_inputs(draft: Draft, lengths: list[list[int]] = LENGTHS) -> tuple[torch.Tensor, ...]:
    """Embeddings, previous hidden states and positions for random tokens in rows of these documents."""
    target, positions = shared_target(), positions_of(lengths)
    tokens = torch.randint(3, 96, positions.shape, generator=torch.Generator().manual_seed(1))
    hidden = target.hidden_states(tokens, positions, packed_attention(lengths))
    previous = shift_hidden(hidden, positions)
    return target.embed(tokens).double(), previous.double(), positions


def slot_loss(kind: str, wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`draft.loss` of one slot, from the target's logits [V'] there and the draft's."""
    p, q = wanted.softmax(-1), logits.log_softmax(-1)
    if kind == "hard":
        return -q[p.argmax()]
    ce = -(p * q).sum()
    if kind == "soft":
        return ce
    accepted = torch.minimum(p, q.exp()).sum()
    weight = (-3.0 * accepted).exp().detach()
    return weight * ce + (1 - weight) * (1 - accepted)


def cached_attention(cache: dict[int, tuple[torch.Tensor, torch.Tensor]], begin: int = 0) -> Attend:
    """`attend` for one token after those in `cache`, to which its keys and values are added. Written out plainly.

    `begin`: the position of the cache's first. Of the rule it knows the chunk, the window and the sinks.
    """

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        if layer in cache:
            k, v = (torch.cat((old, new), dim=2) for old, new in zip(cache[layer], (k, v), strict=True))
        cache[layer] = k, v
        last, groups = k.shape[2] - 1, q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(2, 3)) * rule.scale
        for key in range(last + 1):
            if rule.chunk is not None and (begin + key) // rule.chunk != (begin + last) // rule.chunk:
                scores[..., key] = -torch.inf
            if rule.window is not None and last - key >= rule.window:
                scores[..., key] = -torch.inf
        if rule.sinks is None:
            return scores.softmax(-1) @ v
        with_sink = torch.cat((scores, rule.sinks.view(1, -1, 1, 1)), dim=-1)
        return with_sink.softmax(-1)[..., :-1] @ v

    return attend


def chains(draft: Draft, embeddings: torch.Tensor, previous: torch.Tensor) -> dict[tuple[int, int], torch.Tensor]:
    """The twin, for one document [n, H]: {(depth, slot): hidden state [H]}, one slot after the other as in drafting.

    The cache holds the true hidden states' keys up to a root; a chain goes on from a copy of it on its own states.
    Where the first token has no slot, it is not there at all.
    """
    out, cache, begin = {}, {}, int(draft.config.first_token == "skip")
    for root in range(begin, len(embeddings)):
        attend = cached_attention(cache, begin)
        at_root = draft(embeddings[None, None, root], previous[None, None, root], torch.tensor([[root]]), attend)
        out[0, root], own, state = at_root[0, 0], dict(cache), at_root
        for depth in range(1, min(PASSES, len(embeddings) - root)):
            slot = root + depth
            state = draft(embeddings[None, None, slot], state, torch.tensor([[slot]]), cached_attention(own, begin))
            out[depth, slot] = state[0, 0]
    return out
