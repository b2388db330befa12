"""Which blocks of the store are free, and which sequence has which: for target and draft alike. DESIGN section 3.6.

Knows nothing of tensors: a block is a number.
"""

from eagle_train.inference.paged_kv import BLOCK, WASTE


def blocks_for(slots: int) -> int:
    """How many blocks so many slots take."""
    return -(-slots // BLOCK)


class BlockPool:
    """Hands out block numbers, the lowest first, so that a sequence's blocks mostly follow one another."""

    def __init__(self, blocks: int):
        """`blocks`: how many sequences can have, beside the store's own."""
        self.total = blocks
        self.free = list(range(WASTE + blocks, WASTE, -1))

    @property
    def in_store(self) -> int:
        """How many blocks the store must have."""
        return WASTE + 1 + self.total

    def grow(self, blocks: int) -> None:
        """Have so many in all."""
        self.release(list(range(WASTE + 1 + self.total, WASTE + 1 + blocks)))
        self.total = max(self.total, blocks)

    def has(self, blocks: int) -> bool:
        """Whether so many are free."""
        return blocks <= len(self.free)

    def extend(self, blocks: list[int], slots: int) -> bool:
        """Let `blocks` have room for so many slots; False, and nothing changed, where too few are free."""
        missing = blocks_for(slots) - len(blocks)
        if not self.has(missing):
            return False
        blocks += [self.free.pop() for _ in range(missing)]
        return True

    def release(self, blocks: list[int]) -> None:
        """The blocks are free again; the list is empty then."""
        self.free = sorted([*self.free, *blocks], reverse=True)
        blocks.clear()
