"""Bookkeeping: both caches and the hidden states are rewound to the accepted path. Paper section 3 (stage 6)."""

import torch

from eagle_train.inference.drafting import Pending
from eagle_train.inference.paged_kv import PagedKV, Prefix, Suffix
from eagle_train.inference.sampling import Verified


def commit(
    cache: PagedKV,
    prefix: Prefix,
    suffix: Suffix | None,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    verified: Verified,
) -> Pending:
    """Write the accepted nodes to the target's cache and keep what the draft needs to follow.

    hidden [A, N, H] and tokens [A, N] are the tree's; `suffix` is None where the cache has its nodes already. The
    draft's next slots pair each accepted token, and the target's own after them, with the hidden state of the token
    before it.
    """
    path = verified.path  # its end repeats the last accepted node: safe to gather, and overwritten by the next round
    if suffix is not None:
        cache.commit(suffix, prefix, path)
    accepted = tokens.gather(1, path)
    follow = torch.cat((accepted[:, 1:], accepted[:, :1]), dim=1)
    follow.scatter_(1, verified.num_accepted.unsqueeze(1), verified.next_token.unsqueeze(1))
    return Pending(follow, hidden.take_along_dim(path.unsqueeze(2), dim=1), verified.num_accepted + 1)
