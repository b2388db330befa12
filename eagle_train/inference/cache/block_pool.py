"""Allocates blocks to sequences, shares blocks of equal content, evicts unused ones. DESIGN section 3.6.

One allocation serves target and draft. A full block can be registered under the hash of its content; sequences with the
same beginning then use the same block, with reference counts. A registered block that no sequence uses is idle: its
content stays until the free blocks run out, and idle blocks are evicted least-recently-used. Paper section 3.4.
Knows nothing of tensors: a block is a number.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from eagle_train.inference.cache.prefix import BLOCK, SCRATCH

_OnEvict = Callable[[list[int], list[bytes]], None]


def blocks_for(slots: int) -> int:
    """The number of blocks that `slots` slots need."""
    return -(-slots // BLOCK)


class BlockPool:
    """Allocates block numbers, the lowest first, so that a sequence's blocks are mostly contiguous."""

    def __init__(self, blocks: int, on_evict: _OnEvict | None = None):
        """`blocks`: how many can be allocated, besides the reserved ones. `on_evict`: called with idle blocks and their
        hashes before the blocks are reused."""
        self.total, self.on_evict = blocks, on_evict
        self.free = list(range(SCRATCH + blocks, SCRATCH, -1))  # taken from the end
        self.users = [0] * self.store_size  # reference counts, by block
        self.block_of: dict[bytes, int] = {}  # registered blocks by hash
        self.hash_of: dict[int, bytes] = {}
        self.idle: dict[int, None] = {}  # registered blocks that no sequence uses, the least recently used first

    @property
    def store_size(self) -> int:
        """The number of blocks that the store must have."""
        return self.store_size_for(self.total)

    @staticmethod
    def store_size_for(blocks: int) -> int:
        """The number of blocks of a store with `blocks` allocatable ones."""
        return SCRATCH + 1 + blocks

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated now: free and idle ones."""
        return len(self.free) + len(self.idle)

    def grow(self, blocks: int) -> None:
        """Raise the number of blocks to `blocks` in all."""
        self.free = [*range(SCRATCH + blocks, SCRATCH + self.total, -1), *self.free]
        self.total = max(self.total, blocks)
        self.users += [0] * (self.store_size - len(self.users))

    def extend(self, blocks: list[int], slots: int) -> bool:
        """Append blocks to `blocks`, in place, until they hold `slots` slots. Returns False, and changes nothing, if
        too few are available."""
        missing = max(0, blocks_for(slots) - len(blocks))
        if missing > self.available:
            return False
        if len(self.free) < missing:
            self._evict(list(islice(self.idle, missing - len(self.free))))
        new = [self.free.pop() for _ in range(missing)]
        for block in new:
            self.users[block] = 1
        blocks += new
        return True

    def register(self, block: int, key: bytes) -> None:
        """Register a block whose content is final; `key` is its hash. Of two blocks with one hash the first stays."""
        if key not in self.block_of and block not in self.hash_of:
            self.block_of[key], self.hash_of[block] = block, key

    def is_used(self, block: int) -> bool:
        """Whether a sequence uses the block."""
        return self.users[block] > 0

    def retain(self, block: int) -> None:
        """Increment a registered block's reference count."""
        self.users[block] += 1
        self.idle.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        """Decrement the reference counts of a sequence's blocks, and empty the list. The last block is reused first."""
        for block in blocks:
            self.users[block] -= 1
        unused = [block for block in reversed(blocks) if self.users[block] == 0]
        self.idle |= dict.fromkeys(block for block in unused if block in self.hash_of)
        self._add_free(block for block in unused if block not in self.hash_of)
        blocks.clear()

    def _evict(self, blocks: list[int]) -> None:
        """Make idle blocks free."""
        keys = [self.hash_of.pop(block) for block in blocks]
        if self.on_evict is not None:
            self.on_evict(blocks, keys)
        for block, key in zip(blocks, keys, strict=True):
            del self.idle[block], self.block_of[key]
        self._add_free(blocks)

    def _add_free(self, blocks: Iterable[int]) -> None:
        self.free = sorted([*self.free, *blocks], reverse=True)
