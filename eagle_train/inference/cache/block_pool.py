"""Allocates blocks to sequences, shares blocks of equal content, evicts unused ones. DESIGN section 3.6.

One allocation serves target and draft. A full block can be registered under the hash of its content; sequences with the
same beginning then use the same block, with reference counts. A registered block that no sequence uses is idle: its
content stays until the free blocks run out, and idle blocks are evicted least-recently-used. Paper section 3.4.
Knows nothing of tensors: a block is a number.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import islice
from operator import neg

from eagle_train.inference.cache.prefix import BLOCK, SCRATCH

_OnEvict = Callable[[list[int], list[bytes]], None]


def blocks_for(slots: int) -> int:
    """The number of blocks that `slots` slots need."""
    return -(-slots // BLOCK)


class BlockPool:
    """Allocates block numbers, so that a sequence's blocks follow one another where there is room.

    A sequence's first block begins a region of `region` free blocks, which others use only when no other block is free.
    Regions of one size lie at equal distances. Without a region, a sequence gets the lowest free blocks.
    """

    def __init__(self, blocks: int, on_evict: _OnEvict | None = None):
        """`blocks`: how many can be allocated, besides the reserved ones. `on_evict`: called with idle blocks and their
        hashes before the blocks are reused."""
        self.total, self.on_evict = blocks, on_evict
        self.free = list(range(SCRATCH + blocks, SCRATCH, -1))  # descending
        self.region = 0  # blocks that a new sequence may come to need
        self._regions: dict[int, range] = {}  # by the identity of a sequence's list: its first blocks may be others'
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

    def extend(self, blocks: list[int], slots: int, begins: bool = False) -> bool:
        """Append blocks to `blocks`, in place, until they hold `slots` slots. Returns False, and changes nothing, if
        too few are available. `begins`: the sequence gets a region, if there is one."""
        missing = max(0, blocks_for(slots) - len(blocks))
        if missing > self.available:
            return False
        if len(self.free) < missing:
            self._evict(list(islice(self.idle, missing - len(self.free))))
        if begins and missing > 0 and (region := self._free_region()):
            self._regions[id(blocks)] = region
        own = self._regions.get(id(blocks), range(0))
        for _ in range(missing):
            block = self._next(blocks, own)
            del self.free[self._place(block)]
            self.users[block] = 1
            blocks.append(block)
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
        self._regions.pop(id(blocks), None)
        unused = [block for block in reversed(blocks) if self.users[block] == 0]
        self.idle |= dict.fromkeys(block for block in unused if block in self.hash_of)
        self._add_free(block for block in unused if block not in self.hash_of)
        blocks.clear()

    def _next(self, blocks: list[int], own: range) -> int:
        """The free block that a sequence with these blocks and this region gets next."""
        follows = blocks[-1] + 1 if blocks and blocks[-1] in own else own.start
        if follows in own and self._is_free(follows):
            return follows
        follows = blocks[-1] + 1 if blocks else 0
        if self._is_free(follows) and not any(follows in region for region in self._regions.values()):
            return follows
        at = SCRATCH + 1
        for region in self._in_order():
            lowest = self._lowest_free(at)
            if lowest is not None and lowest < region.start:
                return lowest
            at = region.stop
        return self.free[-1]

    def _free_region(self) -> range:
        """The lowest `region` blocks that are free, consecutive and in no region; empty if there are none."""
        at = SCRATCH + 1
        for region in self._in_order():
            while self.region > 0 and at + self.region <= region.start:
                used = next((block for block in range(at, at + self.region) if not self._is_free(block)), None)
                if used is None:
                    return range(at, at + self.region)
                lowest = self._lowest_free(used)
                at = region.start if lowest is None else lowest
            at = region.stop
        return range(0)

    def _in_order(self) -> list[range]:
        """The regions by their blocks, and an empty one at the end of the store."""
        return [
            *sorted(self._regions.values(), key=lambda region: region.start),
            range(self.store_size, self.store_size),
        ]

    def _is_free(self, block: int) -> bool:
        return SCRATCH < block < self.store_size and self.users[block] == 0 and block not in self.hash_of

    def _place(self, block: int) -> int:
        """Where a block is in `free`, or would be."""
        return bisect_left(self.free, -block, key=neg)

    def _lowest_free(self, at: int) -> int | None:
        """The lowest free block from `at` on."""
        place = self._place(at)
        if place < len(self.free) and self.free[place] == at:
            return at
        return self.free[place - 1] if place > 0 else None

    def _evict(self, blocks: list[int]) -> None:
        """Make idle blocks free. Changes nothing if `on_evict` raises: it copies, and may run out of memory."""
        keys = [self.hash_of[block] for block in blocks]
        if self.on_evict is not None:
            self.on_evict(blocks, keys)
        for block, key in zip(blocks, keys, strict=True):
            del self.idle[block], self.block_of[key], self.hash_of[block]
        self._add_free(blocks)

    def _add_free(self, blocks: Iterable[int]) -> None:
        self.free = sorted([*self.free, *blocks], reverse=True)
