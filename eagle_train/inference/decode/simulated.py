"""Simulated acceptance: rounds accept with given probabilities, whatever was drafted. DESIGN section 3.8.

For measuring latency with random weights, whose drafts would never be accepted. The outputs are meaningless. Knows
nothing of models or requests.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from eagle_train.errors import check
from eagle_train.inference.decode.row_trees import AnyTree
from eagle_train.inference.decode.sampling import Verified, uniform

if TYPE_CHECKING:
    from eagle_train.inference.decode.rounds import RoundInputs


class SimulatedAcceptance:
    """Accepts the first node at depth d with probability `rates[d - 1]`, over all rounds (not given the depth before).

    Where trees differ by row, that is over the rounds whose row has a node at that depth. The draw depends on a
    request's seed and position alone. Raises UserError unless 1 >= rates[0] >= rates[1] ... >= 0.
    """

    def __init__(self, rates: Sequence[float]):
        falling = all(0 <= after <= before <= 1 for before, after in zip([1.0, *rates], rates, strict=False))
        check(len(rates) > 0 and falling, f"acceptance={list(rates)}: must be shares from 1 to 0 that never grow")
        self.rates = torch.tensor(rates, dtype=torch.float64)

    def __call__(self, inputs: "RoundInputs", tree: AnyTree, verified: Verified) -> Verified:
        """`verified` with the accepted node replaced by one of the round's trees."""
        self.rates = self.rates.to(inputs.seeds.device)
        drawn = uniform(inputs.seeds, inputs.prefix.lengths, 1)
        return Verified(tree.first_at((drawn < self.rates).sum(1)), verified.next_token)
