"""Relaxed acceptance: drafts that are nearly as likely as the target's own token. LOSSY, for requests that ask for it.

After TensorRT-LLM's option of this name: of the target's `topk` most likely tokens, all that are as likely as the last
of them included, those count as its own whose probability is at most `delta` below the most likely one's; never one
whose logit is -inf. Knows nothing of models or requests.

Shapes: A rows, R rows that this rank samples, N tree nodes, V vocabulary, K the greatest top-k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.sampling import Verified, verify_chosen
from eagle_train.ops.transfer import to_device


@dataclass(frozen=True)
class Relaxed:
    """The rows that are verified so. `topk` int64 [A], 0 for the others; `delta` float32 [A]; `ends` int64 [A]: the
    token below which nothing is relaxed any more, -1 for none. `most`: K."""

    topk: torch.Tensor
    delta: torch.Tensor
    ends: torch.Tensor
    most: int

    @classmethod
    def of(cls, rows: Sequence[tuple[int, float, int] | None], device: torch.device) -> "Relaxed | None":
        """From each row's top-k, delta and ending token; None for a row that is verified exactly. None if all are."""
        if not any(rows):
            return None
        topk, delta, ends = zip(*(row or (0, 0.0, -1) for row in rows), strict=True)
        numbers = (to_device(topk, device), to_device(delta, device, torch.float32), to_device(ends, device))
        return cls(*numbers, max(topk))

    def rows(self, pick: Callable[[torch.Tensor], torch.Tensor]) -> "Relaxed":
        """Those of the rows that `pick` selects from a tensor [A]."""
        return replace(self, topk=pick(self.topk), delta=pick(self.delta), ends=pick(self.ends))

    def verify(self, exact: Verified, tree: AnyTree, tokens: torch.Tensor, logits: torch.Tensor) -> Verified:
        """`exact`, with these rows verified anew: tokens int64 [R, N], logits [R, N, V]. What follows the last accepted
        node is the target's most likely token."""
        own = verify_chosen(tree, tokens, logits.argmax(-1), self._matches(tree, tokens, logits))
        is_relaxed = self.topk > 0
        return Verified(*(torch.where(is_relaxed, ours, theirs) for ours, theirs in zip(own, exact, strict=True)))

    def _matches(self, tree: AnyTree, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """bool [R, N]: nodes whose token counts as the target's own after their parent; -1 is no token."""
        logits = logits.float()
        best = logits.topk(min(self.most, logits.shape[-1])).values  # [R, N, K]
        # By its value, not its place: among equals the order would depend on K, and so on other rows.
        place = (self.topk.clamp(1, best.shape[-1]) - 1)[:, None, None].expand(*tokens.shape, 1)
        least = tree.at_parents(best.gather(-1, place)[..., 0])
        rows, nodes = (torch.arange(size, device=tokens.device) for size in tokens.shape)
        own = logits[rows.unsqueeze(1), tree.at_parents(nodes.expand_as(tokens)), tokens]  # [R, N]: of the tokens
        total = logits.logsumexp(-1)
        most_likely = tree.at_parents((best[..., 0] - total).exp())
        near = (own - tree.at_parents(total)).exp() >= most_likely - self.delta.unsqueeze(1)
        # Without the last a delta of all of p would accept what a grammar or `min_tokens` forbids.
        match = near & (own >= least) & (own > -torch.inf) & (tokens >= 0)
        ended = (tokens == self.ends.unsqueeze(1)).float()  # no token is -1
        above = tree.ancestors.float() @ ended.unsqueeze(2)  # [R, N, 1]: of the node and its ancestors, those that end
        return match & (above[..., 0] - ended == 0)
