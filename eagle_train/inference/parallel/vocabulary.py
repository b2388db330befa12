"""An LM head that is divided over the ranks of one target: each multiplies with a part of the vocabulary.

Every rank has the whole head, as the target gives it; of a product of few rows its part is all that is read. Knows
nothing of models, requests or caches. Shapes: A active rows, R rows of a rank, W tokens of a part, H hidden, V
vocabulary.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.models.head import LMHead


class DividedHead:
    """The products of this rank's part of an LM head, gathered as they are asked for. All ranks call alike."""

    def __init__(self, lm_head: LMHead, ranks: Ranks):
        self.ranks, self.size = ranks, len(lm_head.weight)
        self.width = -(-self.size // ranks.size)  # tokens of a part; the last one may have fewer
        self.first = min(self.width * ranks.rank, self.size)
        rows = slice(self.first, self.first + self.width)
        bias = None if lm_head.bias is None else lm_head.bias[rows]
        self.part = replace(lm_head, weight=lm_head.weight[rows], bias=bias)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of hidden states [..., H], on every rank."""
        parts = self.ranks.gather(self._own(hidden))  # [size, ..., W]
        return parts.movedim(0, -2).flatten(-2)[..., : self.size]

    def of_own_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [R, ..., V] of this rank's rows (`Ranks.own`) of hidden states [A, ..., H]."""
        if not self.ranks.divided:
            return self(hidden)
        rows = self.ranks.rows_per_rank(len(hidden))
        place = torch.arange(rows * self.ranks.size, device=hidden.device).clamp(max=len(hidden) - 1)
        parts = self.ranks.exchange(self._own(hidden[place]).unflatten(0, (self.ranks.size, rows)))
        return parts.movedim(0, -2).flatten(-2)[..., : self.size]

    def most_likely(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` most likely tokens int64 [..., count] after hidden states [..., H], on every rank.

        Of equal logits the lower id comes first, where `count` is 1. The ranks exchange `count` logits and ids each.
        """
        if count == 1 and len(self.part.weight) > 0:
            value, index = self.part.greatest(hidden)
        else:
            value, index = self._own(hidden).topk(min(count, self.width), dim=-1)
        found = torch.stack((value.double(), (index + self.first).double()), -1)  # ids are exact in float64
        values, tokens = self.ranks.gather(found).movedim(0, -3).flatten(-3, -2).unbind(-1)  # [..., size * count]
        best = values.argmax(-1, keepdim=True) if count == 1 else values.topk(count, dim=-1).indices
        return tokens.gather(-1, best).long()

    def _own(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., W] of this rank's part, -inf behind the last token."""
        logits = self.part(hidden)
        return F.pad(logits, (0, self.width - logits.shape[-1]), value=-math.inf)
