"""What speculative decoding is expected to bring, by the formulas of Leviathan et al. (2023), from acceptance and cost.

Each draft is taken to be accepted with the same probability, alpha, whatever its depth, and a tree to be a chain. What
is measured departs from it where acceptance falls with depth, or where siblings help. Knows nothing of engines.
"""

from collections.abc import Sequence
from itertools import pairwise

from evals.bench.statistics import AnswerBatch


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens of a round that drafts `depth` of them, (1 - alpha^(depth+1)) / (1 - alpha); `depth` + 1 at alpha 1."""
    return depth + 1.0 if alpha == 1 else (1 - alpha ** (depth + 1)) / (1 - alpha)


def expected_tpc(alpha: float, shares: Sequence[float]) -> float:
    """Tokens per call where `shares[k]` of the rounds draft k tokens, one after the other."""
    return sum(share * expected_tokens(alpha, depth) for depth, share in enumerate(shares))


def expected_speedup(tpc: float, depth: float, cost: float) -> float:
    """Over plain decoding: a round has one call of the target and drafts `depth` tokens, each of which takes `cost`
    calls' time."""
    return tpc / (1 + depth * cost)


def depth_shares(batches: Sequence[AnswerBatch]) -> list[float]:
    """The shares of the rounds that draft to a depth of exactly 0, 1, 2, ...; at least one round must be there."""
    stats = [answer.output.stats for batch in batches for answer in batch]
    calls = sum(each.calls for each in stats)
    most = max(len(each.drafted_per_depth) for each in stats)
    rounds = [
        sum(each.drafted_per_depth[depth : depth + 1][0] for each in stats if len(each.drafted_per_depth) > depth)
        for depth in range(most)
    ]
    return [(before - after) / calls for before, after in pairwise([calls, *rounds, 0])]


def mean_depth(shares: Sequence[float]) -> float:
    """Drafted tokens of a round, one after the other, on average."""
    return sum(depth * share for depth, share in enumerate(shares))
