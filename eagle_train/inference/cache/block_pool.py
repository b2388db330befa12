"""Which blocks of the store are free, and which sequences have which: for target and draft alike. DESIGN section 3.6.

A block that was filled may be named by what it holds. Sequences share it then, and when nobody has it any more it is
idle: it stays what it is until there are no free ones, and the least recently used goes first. Paper section 3.4.
Knows nothing of tensors: a block is a number.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from eagle_train.inference.cache.paged_kv import BLOCK, WASTE

Evict = Callable[[list[int], list[bytes]], None]


def blocks_for(slots: int) -> int:
    """How many blocks so many slots take."""
    return -(-slots // BLOCK)


class BlockPool:
    """Hands out block numbers, the lowest first, so that a sequence's blocks mostly follow one another."""

    def __init__(self, blocks: int, evict: Evict | None = None):
        """`blocks`: how many sequences can have, beside the store's own. `evict`: is told of named blocks, and of their
        names, before they are given to others."""
        self.total, self.evict = blocks, evict
        self.free = list(range(WASTE + blocks, WASTE, -1))
        self.users = [0] * self.in_store  # how many sequences have a block
        self.named: dict[bytes, int] = {}
        self.name_of: dict[int, bytes] = {}
        self.idle: dict[int, None] = {}  # named ones that nobody has, the least recently used first

    @property
    def in_store(self) -> int:
        """How many blocks the store must have."""
        return self.held_by(self.total)

    @staticmethod
    def held_by(blocks: int) -> int:
        """How many blocks a store has of which sequences can have so many."""
        return WASTE + 1 + blocks

    @property
    def available(self) -> int:
        """How many blocks can be had: the free and the idle ones."""
        return len(self.free) + len(self.idle)

    def grow(self, blocks: int) -> None:
        """Have so many in all."""
        self.free = [*range(WASTE + blocks, WASTE + self.total, -1), *self.free]
        self.total = max(self.total, blocks)
        self.users += [0] * (self.in_store - len(self.users))

    def extend(self, blocks: list[int], slots: int) -> bool:
        """Let `blocks` have room for so many slots; False, and nothing changed, where too few can be had."""
        missing = max(0, blocks_for(slots) - len(blocks))
        if missing > self.available:
            return False
        if len(self.free) < missing:
            self.empty(list(islice(self.idle, missing - len(self.free))))
        new = [self.free.pop() for _ in range(missing)]
        for block in new:
            self.users[block] = 1
        blocks += new
        return True

    def empty(self, blocks: list[int]) -> None:
        """Idle blocks become free ones."""
        names = [self.name_of.pop(block) for block in blocks]
        if self.evict is not None:
            self.evict(blocks, names)
        for block, name in zip(blocks, names, strict=True):
            del self.idle[block], self.named[name]
        self.give(blocks)

    def give(self, blocks: Iterable[int]) -> None:
        self.free = sorted([*self.free, *blocks], reverse=True)

    def name(self, block: int, name: bytes) -> None:
        """What a block holds is final. Of two that hold the same, one is named."""
        if name not in self.named and block not in self.name_of:
            self.named[name], self.name_of[block] = block, name

    def is_used(self, block: int) -> bool:
        """Whether a sequence has it."""
        return self.users[block] > 0

    def share(self, block: int) -> None:
        """One more sequence has a named block."""
        self.users[block] += 1
        self.idle.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        """A sequence gives up its blocks; the list is empty then. The last is the first to be given to others."""
        for block in blocks:
            self.users[block] -= 1
        unused = [block for block in reversed(blocks) if self.users[block] == 0]
        self.idle |= dict.fromkeys(block for block in unused if block in self.name_of)
        self.give(block for block in unused if block not in self.name_of)
        blocks.clear()
