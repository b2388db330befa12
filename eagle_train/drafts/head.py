"""What a draft proposes with: an LM head, and which of the target's tokens its columns are.

Shapes: V vocabulary, V' the draft's tokens.
"""

from typing import Any

import torch

from eagle_train.drafts.kind import Draft
from eagle_train.errors import check
from eagle_train.models.target import LMHead


class Head:
    """What a draft proposes with: an LM head of its own, or the target's, or that of the draft's own vocabulary.

    `of_target`: the target's LM head for the draft's tokens. `level`: of which, where each has an LM head of its own.
    Raises UserError for a draft that says how many tokens it knows, and not which.
    """

    def __init__(self, draft: Draft, lm_head: LMHead, level: int = 0):
        size = draft.config.vocab_size
        check(
            size is None or draft.vocabulary is not None, f"draft.vocab_size={size}: give draft.vocabulary, the tokens"
        )
        self.vocabulary, self.size = draft.vocabulary, len(lm_head.weight)
        self.of_target = lm_head if self.vocabulary is None else lm_head.of(self.vocabulary)
        self.lm_head: Any = draft.own_head(level) or self.of_target

    def tokens(self, indices: torch.Tensor) -> torch.Tensor:
        """The target's ids of columns of `lm_head`."""
        return indices if self.vocabulary is None else self.vocabulary[indices]

    def columns(self, values: torch.Tensor) -> torch.Tensor:
        """Those of the target's columns [..., V] that `lm_head` has [..., V']."""
        return values if self.vocabulary is None else values[..., self.vocabulary]

    def spread(self, distribution: torch.Tensor) -> torch.Tensor:
        """A distribution [..., V'] over the draft's tokens as one over the target's [..., V]."""
        if self.vocabulary is None:
            return distribution
        whole = distribution.new_zeros(*distribution.shape[:-1], self.size)
        return whole.index_copy_(-1, self.vocabulary, distribution)
