"""The tensors that hold what is kept of each block, all of one size, and how they grow. DESIGN section 3.6.

The target's keys and values, the drafter's, and where texts are found again the hidden states at the blocks' ends.
Which sequence has which block is block_pool.py's. Knows nothing of requests or models.
"""

import math
import sys
from collections.abc import Callable
from collections.abc import Sequence as Listing
from contextlib import suppress
from typing import Protocol

import torch

from eagle_train.errors import OptionError, UserError, check, one_line
from eagle_train.inference.cache.block_pool import BlockPool
from eagle_train.inference.cache.paged_kv import BLOCK
from eagle_train.inference.parallel.tensor_parallel import Ranks

MEMORY_SHARE = 0.9  # of a GPU's free memory, that keys and values may take unasked: forwards need some, too


class Store(Protocol):
    """Something that is kept for each block: a PagedKV, or a BlockEnds."""

    @property
    def by_block(self) -> list[torch.Tensor]:
        """Tensors [n, blocks, ...], to be read and written."""

    def grown(self, blocks: int) -> list[torch.Tensor]:
        """What is to be held with so many blocks in all: those there are, and empty ones."""

    def hold(self, memory: list[torch.Tensor]) -> None:
        """Go on with what `grown` gave."""


class BlockMemory:
    """All stores of an engine, which grow together or not at all."""

    def __init__(
        self,
        stores: Listing[Store],
        pool: BlockPool,
        ranks: Ranks,
        kv_tokens: int | None,
        on_realloc: Callable[[int], None],
    ):
        """`kv_tokens`: as the engine's; raises UserError, as `grow` does, where so much cannot be had. `on_realloc`:
        called with the number of slots that a sequence can have when the stores' tensors were replaced."""
        self.stores, self.pool, self.ranks, self.kv_tokens, self.on_realloc = stores, pool, ranks, kv_tokens, on_realloc
        if kv_tokens is not None:
            self.reserve(kv_tokens // BLOCK)

    @property
    def by_block(self) -> list[torch.Tensor]:
        """All that is kept of the blocks, as [n, blocks, ...] each."""
        return [tensor for store in self.stores for tensor in store.by_block]

    @property
    def block_bytes(self) -> int:
        """What a block takes in all stores."""
        return sum(x.shape[0] * math.prod(x.shape[2:]) * x.element_size() for x in self.by_block)

    def grow(self, blocks: int, least: int) -> None:
        """Have room for so many blocks, if there is memory; for `least` in any case. With less than all, sequences wait
        for each other. Raises UserError, with all as it was, where there is no memory for `least`."""
        affordable = self.ranks.least(self.affordable())
        if least > self.pool.total:
            self.reserve(max(least, min(blocks, affordable)))
        elif blocks <= affordable:
            with suppress(UserError):  # free memory may lie in pieces
                self.reserve(blocks)

    @torch.inference_mode()
    def reserve(self, blocks: int) -> None:
        """Have room for so many blocks of keys and values."""
        held = self.pool.in_store if self.pool.total > 0 else 0
        alone = all(x.shape[1] == held for x in self.by_block)
        check(alone, "draft: this drafter is another engine's; make one for each")
        grown = self.grown(self.pool.held_by(blocks))
        self.pool.grow(blocks)
        for store, memory in zip(self.stores, grown, strict=True):
            store.hold(memory)
        self.on_realloc(self.pool.total * BLOCK)

    def grown(self, blocks: int) -> list[list[torch.Tensor]]:
        """What the stores are to hold with so many blocks. Raises UserError, with all as it was, for want of memory."""
        grown, reason = [], "on another rank"
        try:
            grown = [store.grown(blocks) for store in self.stores]
        except RuntimeError as error:  # of the allocator
            reason = one_line(error)
        gib = blocks * self.block_bytes / 2**30
        check(
            self.ranks.least(len(grown)) > 0,
            f"kv_tokens={self.kv_tokens}: no memory for the keys and values of {blocks * BLOCK} tokens, {gib:.1f} GiB; "
            f"give a smaller max_tokens or kv_tokens: {reason}",
            OptionError,
        )
        return grown

    def affordable(self) -> int:
        """Blocks that there is memory for beside what is held; on a CPU that is not asked."""
        device = self.by_block[0].device
        if device.type != "cuda":
            return sys.maxsize
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + cached) * MEMORY_SHARE) // self.block_bytes
