"""The tensors that store each block's content, and their growth. DESIGN section 3.6.

The stores are the target's keys and values, the drafter's, and, for prefix reuse, the hidden states at the blocks'
ends. All have the same number of blocks. block_pool.py decides which sequence has which block. Knows nothing of
requests or models.
"""

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from eagle_train.errors import OptionError, UserError, check, one_line
from eagle_train.inference.cache.block_pool import BlockPool
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.parallel.tensor_parallel import Ranks
from eagle_train.results import in_words

_MEMORY_SHARE = 0.9  # fraction of a GPU's free memory for the cache without `kv_tokens`; forwards need the rest


class Store(Protocol):
    """Tensors with an entry for each block: a PagedKV, or a BlockEnds."""

    @property
    def by_block(self) -> list[torch.Tensor]:
        """Views [n, blocks, ...] of the tensors."""

    def grown(self, blocks: int) -> list[torch.Tensor]:
        """Copies of the tensors with `blocks` blocks in all, the new ones zero."""

    def hold(self, memory: list[torch.Tensor]) -> None:
        """Use the tensors that `grown` returned from now on."""


def by_block_of(stores: Sequence[Store]) -> list[torch.Tensor]:
    """Views [n, blocks, ...] of all tensors of some stores."""
    return [tensor for store in stores for tensor in store.by_block]


class BlockMemory:
    """All stores of an engine. They are resized together."""

    def __init__(
        self,
        stores: Sequence[Store],
        pool: BlockPool,
        ranks: Ranks,
        kv_tokens: int | None,
    ):
        """`kv_tokens`: slots to allocate now, as in `EngineConfig`; None: `grow` allocates as requests arrive. Raises
        UserError if there is no memory for `kv_tokens`."""
        self.stores, self.pool, self.ranks, self.kv_tokens = stores, pool, ranks, kv_tokens
        self.is_fixed = kv_tokens is not None  # the tensors stay where they are
        if kv_tokens is not None:
            self._resize(kv_tokens // BLOCK)

    @property
    def by_block(self) -> list[torch.Tensor]:
        """Views [n, blocks, ...] of all stores' tensors."""
        return by_block_of(self.stores)

    def reserve_least(self) -> None:
        """See to it that the reserved blocks are there."""
        if self.pool.total == 0 and not self.is_fixed:
            self._resize(1)

    def reserve(self, blocks: int) -> None:
        """Allocate now, and never again: `blocks` blocks, or as many as there is memory for; unless `kv_tokens` did.

        Raises UserError if there is no memory for one block.
        """
        if not self.is_fixed:
            self._resize(max(1, min(blocks, self.ranks.least(self.affordable()))))
            self.is_fixed = True

    def grow(self, blocks: int, least: int) -> None:
        """Grow to `blocks` blocks in all if there is memory, else to fewer, but at least to `least`.

        With fewer than `blocks`, sequences wait for each other. Raises UserError, with nothing changed, if there is no
        memory for `least`.
        """
        affordable = self.ranks.least(self.affordable())
        if least > self.pool.total:
            wanted = max(least, min(blocks, affordable))
            while wanted > least and not self._resized(wanted):
                wanted = max(least, wanted // 2)
            if wanted == least:
                self._resize(least)
        elif blocks <= affordable:
            self._resized(blocks)

    def affordable(self) -> int:
        """The number of further blocks that fit in free GPU memory; no limit on a CPU."""
        device = self.by_block[0].device
        if device.type != "cuda":
            return sys.maxsize
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((torch.cuda.mem_get_info(device)[0] + cached) * _MEMORY_SHARE) // self._block_bytes

    def _resized(self, blocks: int) -> bool:
        """As `_resize`; whether there was memory: on a GPU it may be fragmented, on a CPU nobody knows before."""
        with suppress(UserError):
            self._resize(blocks)
            return True
        return False

    @torch.inference_mode()
    def _resize(self, blocks: int) -> None:
        """Reallocate all stores for `blocks` blocks. Raises UserError, with nothing changed, if memory runs out."""
        held = self.pool.store_size if self.pool.total > 0 else 0
        alone = all(x.shape[1] == held for x in self.by_block)
        check(alone, "draft: this drafter belongs to another engine; make one for each engine")
        grown = self._grown(self.pool.store_size_for(blocks))
        self.pool.grow(blocks)
        for store, memory in zip(self.stores, grown, strict=True):
            store.hold(memory)

    def _grown(self, blocks: int) -> list[list[torch.Tensor]]:
        """Every store's `grown`. Raises OptionError if memory runs out on this rank or another."""
        grown, reason = [], "on another rank"
        try:
            grown = [store.grown(blocks) for store in self.stores]
        except (RuntimeError, TypeError) as error:  # of the allocator; of a size beyond 64 bits
            reason = one_line(error)
        size = self.in_words(blocks)
        if self.ranks.least(len(grown)) == 0:
            raise OptionError(
                f"kv_tokens={self.kv_tokens}: no memory for the keys and values of {blocks * BLOCK} tokens, "
                f"{size}; give a smaller max_tokens or kv_tokens: {reason}",
                "kv_tokens",
            )
        return grown

    def in_words(self, blocks: int) -> str:
        """The size of so many blocks in all stores."""
        return in_words(blocks * self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        """Bytes of a block in all stores."""
        return sum(x.shape[0] * math.prod(x.shape[2:]) * x.element_size() for x in self.by_block)
