"""Prefix caching: a cached prefix is not prefilled again. Paper section 3.4 (persistent KV).

A full block's hash depends on its tokens and, by chaining, on all tokens before them. A block is looked up among the
registered blocks of the store (block_pool.py), then in host memory, to which evicted blocks are offloaded. A block
holds the keys and values of target and drafter, and the target's hidden state at its last token, which the draft needs
as input for the token after it. A request without a drafter takes blocks of any drafter. Knows nothing of models or
sampling. DESIGN section 3.6.
"""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

import torch

from eagle_train.errors import OptionError, one_line
from eagle_train.inference.cache.block_memory import BlockMemory, by_block_of
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.ops.transfer import empty_pinned, to_device


def block_hashes(tokens: list[int], hashes: list[bytes], kind: str = "") -> list[bytes]:
    """The hashes of the full blocks of `tokens`. `hashes`: those that are known, from the first; extended in place.
    `kind`: blocks of different kinds hold different things of the same tokens."""
    for end in range((len(hashes) + 1) * BLOCK, len(tokens) + 1, BLOCK):
        before = hashes[-1] if hashes else b""
        own = array("q", tokens[end - BLOCK : end]).tobytes()
        hashes.append(blake2b(kind.encode() + before + own, digest_size=16).digest())
    return hashes


class HostKV:
    """Evicted blocks in host memory, by hash, with least-recently-used replacement."""

    def __init__(self, memory: BlockMemory, tokens: int):
        """`tokens`: the capacity, at least a block. Raises OptionError where there is no memory for it."""
        # Not the memory, whose pool calls this: a circle is freed late.
        self._stores, self._blocks = memory.stores, tokens // BLOCK
        self.place: dict[bytes, int] = {}  # entry of the tensors by hash, the least recently used first
        self._kept = self._allocated(memory, tokens)  # [blocks, n, ...] for each [n, blocks, ...]
        self._free = list(range(self._blocks))  # entries; it would take the memory that is not there

    def put(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Copy these blocks from the stores to the host; if not all fit, the last ones. Where it runs out of memory,
        none of them is found."""
        new = [pair for pair in zip(blocks, hashes, strict=True) if not self.touch(pair[1])][-self._blocks :]
        while len(self._free) < len(new):
            self._free.append(self.place.pop(next(iter(self.place))))
        entries = self._free[: len(new)]
        for kept, source in zip(self._kept, by_block_of(self._stores), strict=True):
            index = to_device([block for block, _ in new], source.device, torch.long)
            moved = source.index_select(1, index).transpose(0, 1).contiguous()  # [new, n, ...]
            for entry, block in zip(entries, moved, strict=True):
                kept[entry].copy_(block, non_blocking=True)
        del self._free[: len(new)]  # only now: what is copied in part must not be found
        self.place |= {key: entry for (_, key), entry in zip(new, entries, strict=True)}

    def get(self, hashes: list[bytes], blocks: list[int]) -> None:
        """Copy the host's blocks with these hashes to `blocks` of the stores."""
        for kept, stored in zip(self._kept, by_block_of(self._stores), strict=True):
            found = [kept[self.place[key]].to(stored.device, non_blocking=True) for key in hashes]
            stored[:, to_device(blocks, stored.device, torch.long)] = torch.stack(found, 1)

    def touch(self, key: bytes) -> bool:
        """Whether a block of this hash is in host memory; marks it as the most recently used."""
        if key in self.place:
            self.place[key] = self.place.pop(key)
            return True
        return False

    def _allocated(self, memory: BlockMemory, tokens: int) -> list[torch.Tensor]:
        """Pinned memory [blocks, n, ...] for each tensor [n, blocks, ...]: a block is contiguous, so that its copy is
        asynchronous. Raises OptionError where memory runs out on this rank or another."""
        kept, reason = list[torch.Tensor](), "on another rank"
        try:
            kept = [empty_pinned((self._blocks, x.shape[0], *x.shape[2:]), x.dtype, x.device) for x in memory.by_block]
        except (RuntimeError, TypeError) as error:  # of the allocator; of a size beyond 64 bits
            reason = one_line(error)
        if memory.ranks.least(len(kept)) == 0:
            size = memory.in_words(self._blocks)
            raise OptionError(
                f"host_kv_tokens={tokens}: the host has no memory for their keys and values, {size}; give fewer: "
                f"{reason}"
            )
        return kept


class PrefixCache:
    """Finds cached blocks for the prefix of a sequence, and registers the blocks that sequences fill."""

    def __init__(self, memory: BlockMemory, host_tokens: int, drafters: Iterable[str] = ()):
        """`host_tokens`: capacity in host memory for evicted blocks, at least a block; 0: none. `drafters`: names of
        those with caches, whose blocks differ. Raises OptionError where the host lacks that memory."""
        self._pool, self._drafters = memory.pool, tuple(drafters)
        self.host = HostKV(memory, host_tokens) if host_tokens > 0 else None
        if self.host is not None:
            self._pool.on_evict = self.host.put

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The store's blocks that hold a prefix of the sequence. At least one token is left to prefill, because
        decoding starts from its hidden state."""
        tokens, found = sequence.to_prefill, []
        by_kind = [block_hashes(tokens, sequence.block_hashes, sequence.cached_by)]
        if not sequence.cached_by:  # a drafter's blocks hold all that it needs, and more
            by_kind += [block_hashes(tokens, sequence.drafter_hashes.setdefault(x, []), x) for x in self._drafters]
        for place in range((len(tokens) - 1) // BLOCK):
            keys = [hashes[place] for hashes in by_kind]
            block = next((self._pool.block_of[key] for key in keys if key in self._pool.block_of), None)
            if block is None:
                break
            found.append(block)
        return found

    def attach(self, sequence: Sequence) -> None:
        """Assign the store's blocks of its prefix to the sequence, which has no blocks yet."""
        assert not sequence.blocks
        sequence.blocks = self.cached_blocks(sequence)
        sequence.num_computed = len(sequence.blocks) * BLOCK
        for block in sequence.blocks:
            self._pool.retain(block)
        if self.host is not None:
            for key in reversed(sequence.block_hashes):
                self.host.touch(key)  # allocating the sequence's other blocks must not overwrite what `load` copies

    def load(self, sequence: Sequence) -> None:
        """Copy the blocks that follow from host memory, as far as they are there, into the sequence's own blocks."""
        if self.host is None:
            return
        first, hashes = sequence.num_computed // BLOCK, []
        for key in sequence.block_hashes[first : (len(sequence.to_prefill) - 1) // BLOCK]:
            if not self.host.touch(key):
                break
            hashes.append(key)
        if hashes:
            self.host.get(hashes, sequence.blocks[first : first + len(hashes)])
            sequence.num_computed += len(hashes) * BLOCK
            self.register(sequence)

    def register(self, sequence: Sequence) -> None:
        """Register the full blocks of the sequence, so that other sequences can reuse them."""
        full = sequence.num_computed // BLOCK
        tokens = (sequence.prompt + sequence.generated)[: full * BLOCK]
        hashes = block_hashes(tokens, sequence.block_hashes, sequence.cached_by)
        for block, key in zip(sequence.blocks[:full], hashes[:full], strict=True):
            self._pool.register(block, key)
