"""Hidden states at the ends of blocks, which are kept beside keys and values: the target's, for prefix caching, and
those of a draft that goes on from its own.

DESIGN section 3.6.
Knows nothing of token ids, models or requests.
"""

import torch

from eagle_train.inference.cache.prefix import BLOCK, SCRATCH, Prefix


class BlockEnds:
    """The target's hidden state at the last token of each block, [blocks, H].

    A sequence with a cached prefix needs it: the draft's input at its first new token is the hidden state before.
    """

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device | str):
        self.hidden = torch.zeros(0, width, dtype=dtype, device=device)

    def grown(self, blocks: int) -> list[torch.Tensor]:
        """As `PagedKV.grown`."""
        return [torch.cat((self.hidden, self.hidden.new_zeros(blocks - len(self.hidden), self.hidden.shape[1])))]

    def hold(self, memory: list[torch.Tensor]) -> None:
        """As `PagedKV.hold`."""
        (self.hidden,) = memory

    @property
    def by_block(self) -> list[torch.Tensor]:
        """A view [1, blocks, H]."""
        return [self.hidden.unsqueeze(0)]

    def write(self, prefix: Prefix, hidden: torch.Tensor) -> None:
        """Store, of the hidden states [A, T, H] of the T tokens after each row's prefix, those at block ends."""
        slots = prefix.slots(prefix.positions(hidden.shape[1]))
        self.hidden[torch.where(slots % BLOCK == BLOCK - 1, slots // BLOCK, SCRATCH)] = hidden


class LastStates(BlockEnds):
    """States [blocks, W] at the last token of each block that was processed: the block's end, and of a sequence's last
    block, which is not full, the token before the next."""

    def write_last(self, prefix: Prefix, states: torch.Tensor, counts: torch.Tensor) -> None:
        """Store what is needed of the states [A, T, W] of the tokens after each row's prefix, of which the first
        `counts` int64 [A], at least one, are real."""
        slots = prefix.slots(prefix.positions(states.shape[1]))
        place, last = torch.arange(states.shape[1], device=slots.device), counts.unsqueeze(1) - 1
        is_kept = (place == last) | ((place < last) & (slots % BLOCK == BLOCK - 1))
        self.hidden[torch.where(is_kept, slots // BLOCK, SCRATCH)] = states

    def before(self, prefix: Prefix) -> torch.Tensor:
        """The states [A, 1, W] at each prefix's last token; zeros where it is empty."""
        positions = (prefix.lengths - 1).unsqueeze(1)
        states = self.hidden[prefix.slots(positions.clamp(min=0)) // BLOCK]
        return states.masked_fill((positions < 0).unsqueeze(2), 0.0)
