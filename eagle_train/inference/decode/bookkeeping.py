"""Bookkeeping, in two parts that do not wait for each other. Paper sections 3 (stage 6) and 3.3.

`commit` runs on the device: it keeps the accepted path's keys, values and hidden states, and the next round can start.
`RoundResult` copies the committed tokens to the host meanwhile. Knows nothing of requests.

Shapes: A active rows, N tree nodes, P nodes of a path (the tree's depth + 1; N for a chain), H hidden.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.logprobs import LogprobCopy, TokenLogprobs
from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.sampling import Verified
from eagle_train.inference.drafters.drafter import Pending
from eagle_train.ops.transfer import HostCopy


def commit(
    cache: PagedKV,
    prefix: Prefix,
    tree: AnyTree,
    suffix: Suffix | None,
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    verified: Verified,
) -> Pending:
    """Write the accepted nodes to the target's cache, and return what the drafter processes next.

    hidden [A, N, H] and tokens int64 [A, N] are the tree's. `suffix`: None for a chain, whose nodes are in the cache
    already. The result has each committed token, the accepted ones and then the target's own, with the hidden state of
    the token before it.
    """
    if tree.num_nodes == 1:
        return Pending(verified.next_token.unsqueeze(1), hidden, verified.node + 1, prefix.lengths + 1, is_full=True)
    accepted = verified.node  # int64 [A]: the number of accepted nodes; for a chain it is the node's number
    if suffix is not None:
        path = tree.paths_to(accepted)  # [A, P]; repeats the last accepted node; the next round overwrites those slots
        cache.commit(suffix, prefix, path)
        tokens, hidden = tokens.gather(1, path), hidden.take_along_dim(path.unsqueeze(2), dim=1)
        accepted = tree.depths_of(accepted)
    # tokens [A, P]: the root is committed already, so the path is shifted by one, and the target's token put behind it
    follow = tokens.roll(-1, 1).scatter_(1, accepted.unsqueeze(1), verified.next_token.unsqueeze(1))
    counts = accepted + 1
    return Pending(follow, hidden, counts, prefix.lengths + counts)


def report_of(committed: Pending) -> torch.Tensor:
    """What the host must know of `commit`'s result, int64 [A, 2 + P]: how many tokens each row committed, how many of
    them precede the first one whose hidden state is NaN or infinite, and the tokens."""
    finite = committed.hidden.isfinite().all(2).cumprod(1).sum(1)
    return torch.column_stack((committed.counts, finite, committed.tokens))


class FirstToken(NamedTuple):
    """What a prefill ends with. `logprobs`: None where the request did not ask."""

    token: int
    logprobs: TokenLogprobs | None


def first_tokens(tokens: list[int], logprobs: LogprobCopy | None) -> list[FirstToken]:
    """One per row. `logprobs`: None where no row asks. Waits for the copy."""
    found = [None] * len(tokens) if logprobs is None else logprobs.of([[token] for token in tokens])
    return [FirstToken(token, own[0] if own else None) for token, own in zip(tokens, found, strict=True)]


@dataclass(frozen=True)
class Gain:
    """What a round brought a row.

    `tokens`: those it committed. `draft_lag`: how many of the row's newest tokens are not in the drafter's cache.
    `finite`: no hidden state of the target was NaN or infinite; otherwise `tokens` ends before the first that was.
    `depth`: of its tree. `at_fault`: its drafter was wrong. `logprobs`: of each token; None for a row that did not ask.
    """

    tokens: list[int]
    draft_lag: int
    finite: bool
    depth: int
    at_fault: bool
    logprobs: list[TokenLogprobs] | None = None


class RoundResult:
    """The results of a launched round, whose copy from the device to the host is under way."""

    def __init__(
        self,
        max_depth: int,
        report: torch.Tensor,
        draft_lag: torch.Tensor,
        row_depth: torch.Tensor | None = None,
        at_fault: torch.Tensor | None = None,
        reasons: dict[int, str] | None = None,
        undrafted: Collection[int] = (),
        logprobs: LogprobCopy | None = None,
    ):
        """`report`: of `report_of`; `draft_lag` int64 [A]: see `Gain`. `row_depth` int64 [A]: None: all rows' trees are
        as deep as `max_depth`. `at_fault` bool [A]: None: no row's drafter is. `reasons`: those that the host knows.
        `undrafted`: rows without drafts. `logprobs`: None where no row asks."""
        self.max_depth, self.reasons, self._undrafted = max_depth, reasons or {}, set(undrafted)
        self.max_tokens = max_depth + 1  # the most that the round commits of a row
        self._has_depth, self._has_faults = row_depth is not None, at_fault is not None
        more = [x for x in (row_depth, at_fault) if x is not None]
        self._arriving, self._logprobs = HostCopy(torch.column_stack((*more, draft_lag, report))), logprobs

    def gains(self) -> list[Gain]:
        """One per row. Waits for the copy."""
        gains = []
        for row, numbers in enumerate(self._arriving.wait().tolist()):
            depth = numbers.pop(0) if self._has_depth else 0 if row in self._undrafted else self.max_depth
            at_fault = bool(numbers.pop(0)) if self._has_faults else False
            lag, count, finite, *tokens = numbers
            gains.append(Gain(tokens[: min(count, finite)], lag, count <= finite, depth, at_fault))
        if self._logprobs is None:
            return gains
        found = self._logprobs.of([gain.tokens for gain in gains])
        return [replace(gain, logprobs=own) for gain, own in zip(gains, found, strict=True)]
