"""What a round of decoding is given, and what its validation returns. DESIGN section 3.9.

Shapes: A active rows, N tree nodes, R rows that this rank samples, S the width of the states, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle_train.inference.cache.prefix import Prefix
from eagle_train.inference.cache.suffix import Suffix
from eagle_train.inference.decode.adjustments import Adjustments
from eagle_train.inference.decode.logprobs import LogprobRows
from eagle_train.inference.decode.relaxed import Relaxed
from eagle_train.inference.decode.sampling import SamplingTensors
from eagle_train.inference.drafters.drafter import Choice, Pending, RowText, TreePlan
from eagle_train.inference.grammar.guided import Guidance


@dataclass(frozen=True)
class RoundInputs:
    """All inputs of a round besides models and caches.

    `prefix`: length and block table of each row in the target's cache; `draft_prefix`: the same in the drafter's cache,
    None if nothing is drafted in this round. `pending`: the tokens after `draft_prefix`. `sampling` and `seeds` int64
    [A]: of the rows. `drafting`: how children are chosen (`EngineConfig`); `draws` float64 [A, draws]: its random
    numbers, None for greedy drafts. `guidance`: the tokens that the rows' grammars allow, None without a grammar.
    `seats`: the name of each row's drafter, None for rows without. `texts`: the rows', where a drafter reads them.
    `adjustments`: what requests change of the target's logits; `logprobs`: the rows that ask for log-probabilities;
    None where no row has any. `relaxed`: rows that are verified with loss, because they ask for it.
    """

    plan: TreePlan
    prefix: Prefix
    draft_prefix: Prefix | None
    pending: Pending
    sampling: SamplingTensors
    seeds: torch.Tensor
    drafting: str
    draws: torch.Tensor | None
    guidance: Guidance | None
    seats: Sequence[str | None] = ()
    texts: list[RowText] | None = None
    adjustments: Adjustments | None = None
    logprobs: LogprobRows | None = None
    relaxed: Relaxed | None = None

    @property
    def has_plain_end(self) -> bool:
        """Whether the target's logits are sampled as they are, but for what grammars forbid, and nothing else is read
        from them."""
        return not any((self.adjustments, self.logprobs, self.relaxed))

    @property
    def choice(self) -> Choice:
        """How children are chosen. At temperature 0 every mode proposes the most likely tokens."""
        if self.draws is None:
            return Choice(guidance=self.guidance)
        # draws[row]: one for the last token, one per node for its acceptance, then the drafts' noise.
        noise = self.draws[:, 1 + self.plan.tree.num_nodes :]
        return Choice(self.drafting, self.sampling.temperature, noise, self.guidance)


class Validated(NamedTuple):
    """The target's states [A, N, S] at the tree's nodes (`Needs.layers`), its logits [R, N, V] for this rank's R rows,
    and the nodes' keys and values if they are not in the cache yet."""

    hidden: torch.Tensor
    logits: torch.Tensor
    suffix: Suffix | None
