"""Texts that were read before are not read again: the paper's persistent KV (section 3.4). DESIGN section 3.6.

A full block is known by its tokens and all tokens before them, through a chain of hashes. It is looked for among the
store's blocks (block_pool.py), then in host memory, where blocks go that the store has no room for. What is kept of a
block is kept together: the target's keys and values, the drafter's, and the target's hidden state at the block's last
token, which the next slot of a draft is paired with. Knows nothing of models or sampling.
"""

from array import array
from hashlib import blake2b

import torch

from eagle_train.inference.cache.block_memory import BlockMemory
from eagle_train.inference.cache.paged_kv import BLOCK
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.ops.transfer import empty_pinned, to_device


def names_of(tokens: list[int], names: list[bytes]) -> list[bytes]:
    """`names`, made as long as `tokens` have full blocks: each depends on its block's tokens and the name before."""
    for end in range((len(names) + 1) * BLOCK, len(tokens) + 1, BLOCK):
        before = names[-1] if names else b""
        names.append(blake2b(before + array("q", tokens[end - BLOCK : end]).tobytes(), digest_size=16).digest())
    return names


class HostKV:
    """Blocks in host memory; the least recently used make room."""

    def __init__(self, memory: BlockMemory, blocks: int):
        self.memory, self.blocks = memory, blocks
        self.place: dict[bytes, int] = {}  # the least recently used first
        self.kept = [self.room_for(tensor) for tensor in memory.by_block]

    def room_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """[blocks, L, ...]: each block in one piece, which is copied while the host goes on."""
        return empty_pinned((self.blocks, tensor.shape[0], *tensor.shape[2:]), tensor.dtype, tensor.device)

    def put(self, blocks: list[int], names: list[bytes]) -> None:
        """Keep what the stores hold in these blocks, the last ones where there is no room for all."""
        new = [pair for pair in zip(blocks, names, strict=True) if not self.touch(pair[1])][-self.blocks :]
        for _, name in new:
            full = len(self.place) == self.blocks
            self.place[name] = self.place.pop(next(iter(self.place))) if full else len(self.place)
        for kept, source in zip(self.kept, self.memory.by_block, strict=True):
            index = to_device([block for block, _ in new], source.device, torch.long)
            there = source.index_select(1, index).transpose(0, 1).contiguous()
            for (_, name), block in zip(new, there, strict=True):
                kept[self.place[name]].copy_(block, non_blocking=True)

    def get(self, names: list[bytes], blocks: list[int]) -> None:
        """Write what is kept under these names into the stores' blocks."""
        for kept, stored in zip(self.kept, self.memory.by_block, strict=True):
            found = [kept[self.place[name]].to(stored.device, non_blocking=True) for name in names]
            stored[:, to_device(blocks, stored.device, torch.long)] = torch.stack(found, 1)

    def touch(self, name: bytes) -> bool:
        """Whether it is kept; it is the most recently used one then."""
        if name in self.place:
            self.place[name] = self.place.pop(name)
            return True
        return False


class PrefixCache:
    """Finds what the caches have of a text, and notes what they get."""

    def __init__(self, memory: BlockMemory, host_blocks: int):
        self.pool = memory.pool
        self.host = HostKV(memory, host_blocks) if host_blocks > 0 else None
        if self.host is not None:
            self.pool.evict = self.host.put

    def shared(self, sequence: Sequence) -> list[int]:
        """The store's blocks that hold the beginning of the sequence's text; at least one token is left to read."""
        text, found = sequence.to_prefill, []
        for name in names_of(text, sequence.names)[: (len(text) - 1) // BLOCK]:
            if name not in self.pool.named:
                break
            found.append(self.pool.named[name])
        return found

    def take(self, sequence: Sequence) -> None:
        """The sequence gets the blocks that hold the beginning of its text."""
        assert not sequence.blocks
        sequence.blocks = self.shared(sequence)
        sequence.read = len(sequence.blocks) * BLOCK
        for block in sequence.blocks:
            self.pool.share(block)
        if self.host is not None:
            for name in reversed(sequence.names):
                self.host.touch(name)  # making room for the sequence must not drop what it is made for

    def fetch(self, sequence: Sequence) -> None:
        """What follows of its text in host memory is copied into the sequence's own blocks."""
        if self.host is None:
            return
        first, names = sequence.read // BLOCK, []
        for name in sequence.names[first : (len(sequence.to_prefill) - 1) // BLOCK]:
            if not self.host.touch(name):
                break
            names.append(name)
        if names:
            self.host.get(names, sequence.blocks[first : first + len(names)])
            sequence.read += len(names) * BLOCK
            self.note(sequence)

    def note(self, sequence: Sequence) -> None:
        """What both models have read of it can be found from now on, as far as it fills blocks."""
        full = sequence.read // BLOCK
        names = names_of((sequence.prompt + sequence.generated)[: full * BLOCK], sequence.names)
        for block, name in zip(sequence.blocks[:full], names[:full], strict=True):
            self.pool.name(block, name)
