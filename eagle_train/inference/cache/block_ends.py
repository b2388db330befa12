"""The target's hidden states at the ends of blocks, which prefix caching keeps beside keys and values.

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
