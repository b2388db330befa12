"""Bookkeeping, in two halves that need not wait for each other. Paper sections 3 (stage 6) and 3.3.

`commit` is the device's: caches and hidden states are rewound to the accepted path, and the next round can begin.
`Round` is the host's: what came of it, once that is known.
"""

from dataclasses import dataclass

import torch

from eagle_train.inference.cache.paged_kv import PagedKV, Prefix, Suffix
from eagle_train.inference.decode.sampling import Verified
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import Pending, Plan
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.ops.transfer import Arriving


def commit(
    cache: PagedKV,
    prefix: Prefix,
    tree: Tree,
    suffix: Suffix | None,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    verified: Verified,
) -> Pending:
    """Write the accepted nodes to the target's cache and keep what the draft needs to follow.

    hidden [A, N, H] and tokens [A, N] are the tree's; `suffix` is None for a chain, whose nodes the cache has already.
    The draft's next slots pair each accepted token, and the target's own after them, with the hidden state of the token
    before it.
    """
    accepted = verified.node  # how many: a chain's nodes are numbered so
    if suffix is not None:
        path = tree.path_to[accepted]  # its end repeats the last accepted node, to be overwritten by the next round
        cache.commit(suffix, prefix, path)
        tokens, hidden = tokens.gather(1, path), hidden.take_along_dim(path.unsqueeze(2), dim=1)
        accepted = tree.depth[accepted]
    follow = tokens.roll(-1, 1).scatter_(1, accepted.unsqueeze(1), verified.next_token.unsqueeze(1))
    counts = accepted + 1
    return Pending(follow, hidden, counts, prefix.lengths + counts)


@dataclass(frozen=True)
class Gain:
    """What a round brought a sequence: the tokens it committed, and how many of the newest the drafter has not read.

    `finite`: no hidden state of the target was NaN or infinite; else the tokens are those that came before it.
    """

    tokens: list[int]
    unread: int
    finite: bool


class Round:
    """A round that the device has been told to do, for these sequences."""

    def __init__(self, sequences: list[Sequence], plan: Plan, pending: Pending, unread: torch.Tensor):
        """`pending`: what it leaves; `unread` [A]: how many of it the drafter is to read."""
        self.sequences, self.plan = list(sequences), plan
        self.most = plan.tree.max_depth + 1  # tokens it may bring a sequence
        sound = pending.hidden.isfinite().all(2).cumprod(1).sum(1)  # tokens before the first of which it is not so
        self.arriving = Arriving(torch.column_stack((pending.counts, unread, sound, pending.tokens)))

    def gains(self) -> list[tuple[Sequence, Gain]]:
        """What it brought each sequence. The host waits until that is known."""
        rows = zip(self.sequences, self.arriving.wait().tolist(), strict=True)
        return [
            (sequence, Gain(tokens[: min(count, sound)], unread, count <= sound))
            for sequence, (count, unread, sound, *tokens) in rows
        ]
