"""Bookkeeping, in two halves that need not wait for each other. Paper sections 3 (stage 6) and 3.3.

`commit` runs on the device: caches and hidden states are rewound to the accepted path, and the next round can start.
`RoundResult` brings the committed tokens to the host. Knows nothing of requests.
"""

from dataclasses import dataclass

import torch

from eagle_train.inference.cache.paged_kv import PagedKV, Prefix, Suffix
from eagle_train.inference.decode.sampling import Verified
from eagle_train.inference.decode.tree import Tree
from eagle_train.inference.drafters.drafter import Pending
from eagle_train.ops.transfer import HostCopy


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
    """What a round brought a row: the tokens it committed, and how many of the newest the drafter has not read.

    `finite`: no hidden state of the target was NaN or infinite; otherwise the tokens are those that came before it.
    """

    tokens: list[int]
    unread: int
    finite: bool


class RoundResult:
    """The results of a round that was launched, on their way from the device to the host."""

    def __init__(self, max_depth: int, committed: Pending, unread: torch.Tensor):
        """`committed`: what the round committed; `unread` [A]: how many tokens of each row the drafter has not read."""
        self.max_depth = max_depth
        self.max_tokens = max_depth + 1  # that it may commit of a row
        finite = committed.hidden.isfinite().all(2).cumprod(1).sum(1)  # tokens before the first that is not
        self._arriving = HostCopy(torch.column_stack((committed.counts, unread, finite, committed.tokens)))

    def gains(self) -> list[Gain]:
        """What the round brought each row. The host waits for it."""
        rows = self._arriving.wait().tolist()
        return [Gain(tokens[: min(count, finite)], unread, count <= finite) for count, unread, finite, *tokens in rows]
