"""The pieces of an answer of a prefill process: what they are, how they are packed, and what has arrived of them.

A unit is what leaves at once: a layer's keys and values, or another of a block's tensors. The blocks of an answer are
those of its texts, one text after the other, each from the block on in which its first token lies that the decode
process does not have. A piece is a unit's content in some of these blocks. A prefill process sends, for each batch:

    BLOCKS   int64: which blocks of the answer the next pieces hold
    0, 1...  for each unit: its content there, each of the unit's tensors [blocks, ...] after the other

and in the end:

    HIDDEN   [texts, S]: the target's states at the texts' last tokens
    TOKENS   JSON: the texts' first tokens
    FAILED   instead, at any time: no more comes

Knows nothing of processes. DESIGN section 3.6. Shapes: B blocks, S the width of the target's states.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Listing
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from eagle_train.inference.cache.block_memory import Store
from eagle_train.inference.cache.block_pool import blocks_for
from eagle_train.inference.cache.paged_kv import PagedKV
from eagle_train.inference.cache.prefix import BLOCK
from eagle_train.inference.parallel.lines import Deadline, Header, Line, from_bytes
from eagle_train.inference.requests.prefiller import Chunk
from eagle_train.inference.requests.sequence import Sequence
from eagle_train.ops.transfer import host_to_device, to_device

BLOCKS, HIDDEN, TOKENS, FAILED = -1, -2, -3, -4

Unit = list[torch.Tensor]
"""Tensors [blocks, ...] of one dtype, views of a store's."""
Send = Callable[..., None]
"""`send(what, tensor)`; FAILED has no tensor."""


def units_of(stores: Listing[Store]) -> dict[tuple[int, int], Unit]:
    """All units, by the store's place and, in a cache, the layer. They hold until the stores are resized."""
    units: dict[tuple[int, int], Unit] = {}
    for place, store in enumerate(stores):
        if isinstance(store, PagedKV):
            own = {layer: pair for layer, pair in store.layers.items() if layer not in store.given}
            units |= {(place, layer): [x.unflatten(0, (-1, BLOCK)) for x in pair] for layer, pair in own.items()}
        else:
            units |= {(place, number): [x.transpose(0, 1)] for number, x in enumerate(store.by_block)}
    return units


def layout(stores: Listing[Store], width: int) -> list[Any]:
    """What decode and prefill process must have in common, as JSON makes it. `width`: S."""
    return [width, *([str(x.dtype), *x.shape[1:]] for unit in units_of(stores).values() for x in unit)]


def first_blocks(lengths: list[int], starts: list[int]) -> list[int]:
    """Where in the answer's blocks each text begins, and how many there are. `starts`: the first tokens that the decode
    process does not have."""
    counts = (blocks_for(length) - start // BLOCK for length, start in zip(lengths, starts, strict=True))
    return list(accumulate(counts, initial=0))


def pack(unit: Unit, blocks: torch.Tensor) -> torch.Tensor:
    """A unit's content in blocks int64 [B], a 1-D tensor."""
    return torch.cat([x.index_select(0, blocks.to(x.device)).flatten() for x in unit])


def unpack(unit: Unit, blocks: torch.Tensor, piece: torch.Tensor) -> None:
    """Write the output of `pack`, in host memory, to blocks int64 [B] of a unit of the same layout; not to those below
    0."""
    kept = slice(None) if bool((blocks >= 0).all()) else blocks >= 0
    for x, part in zip(unit, piece.split([len(blocks) * x[0].numel() for x in unit]), strict=True):
        content = part.view(len(blocks), *x.shape[1:])[kept]
        x[host_to_device(blocks[kept], x.device)] = content.to(x.device, non_blocking=True)


class Sender:
    """Sends the pieces of an answer while its texts are prefilled."""

    def __init__(self, stores: Listing[Store], sequences: list[Sequence], starts: list[int], send: Send):
        """`starts`: as for `first_blocks`."""
        self._units, self._send = units_of(stores), send
        self._numbers = {unit: number for number, unit in enumerate(self._units)}
        self._caches = {place: store for place, store in enumerate(stores) if isinstance(store, PagedKV)}
        self._sent = dict(zip(sequences, starts, strict=True))  # how many of each text's tokens the other has
        lengths = [len(sequence.to_prefill) for sequence in sequences]
        first = first_blocks(lengths, starts)[:-1]
        self._shift = {each: at - start // BLOCK for each, at, start in zip(sequences, first, starts, strict=True)}

    @contextmanager
    def sending(self, batch: list[Chunk]) -> Iterator[None]:
        """Within, this batch is prefilled: what a layer has written leaves at once, and the rest in the end."""
        places, blocks = self._blocks_of(batch)
        if not blocks:
            yield
            return
        self._send(BLOCKS, torch.tensor(places))
        unsent = dict.fromkeys(self._units)
        index = to_device(blocks, next(iter(self._units.values()))[0].device)

        def leave(place: int, layer: int) -> None:
            unit = place, layer
            self._send(self._numbers[unit], pack(self._units[unit], index))
            unsent.pop(unit, None)

        for place, cache in self._caches.items():
            cache.on_write = partial(leave, place)
        try:
            yield
        finally:
            for cache in self._caches.values():
                cache.on_write = None
        for unit in list(unsent):
            leave(*unit)

    def _blocks_of(self, batch: list[Chunk]) -> tuple[list[int], list[int]]:
        """The blocks that the other lacks when a batch is prefilled: their places in the answer, and their numbers.
        What the prefix cache has of a text goes with its first chunk."""
        places, blocks = list[int](), list[int]()
        for sequence, count in batch:
            end, sent = sequence.num_computed + count, self._sent[sequence]
            rows = range(sent // BLOCK, blocks_for(end))
            places += [self._shift[sequence] + row for row in rows]
            blocks += [sequence.blocks[row] for row in rows]
            self._sent[sequence] = max(sent, end)
        return places, blocks


class Answer:
    """What has arrived of an answer, in host memory."""

    def __init__(self, units: Mapping[Any, Unit], blocks: int, texts: int, width: int, dtype: torch.dtype):
        """`blocks`: how many the answer has. `width`: S."""
        tensors = list(units.values())
        self._units = [(sum(math.prod(x.shape[1:]) for x in unit), unit[0].dtype) for unit in tensors]  # of one block
        self._texts, self._states, self._pinned = texts, (texts * width, dtype), tensors[0][0].is_cuda
        self._missing = torch.ones(len(units), blocks, dtype=torch.bool)
        self._blocks = torch.empty(0, dtype=torch.int64)  # which the next pieces hold
        self.pieces: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # unit, blocks of the answer, content
        self.hidden = torch.empty(0, dtype=dtype)  # [texts, S]
        self.tokens: list[Any] = []

    def receive(self, line: Line, number: int, deadline: Deadline) -> bool:
        """Receive the answer to the request of this number. False: its prefill failed. Raises RuntimeError for what was
        not asked for, and as `Line` does."""
        while not self.tokens:
            header = line.recv_header(deadline.left)
            _insist(header.number == number, "to another request")  # that an earlier engine abandoned
            if header.what == FAILED:
                return False
            length, dtype = self._expected(header)
            _insist(header.length == length, "of another length")
            pinned = self._pinned and header.what != TOKENS
            body = torch.empty(length, dtype=dtype, pin_memory=pinned)
            self._keep(header.what, line.recv_tensor(body, deadline.left))
        is_whole = len(self.hidden) > 0 and not bool(self._missing.any())
        _insist(is_whole and len(self.tokens) == self._texts, "incomplete")
        return True

    def _expected(self, header: Header) -> tuple[int, torch.dtype]:
        """Elements, and their type, of what a header announces."""
        if header.what == TOKENS:
            return max(header.length, 1), torch.uint8
        if header.what == BLOCKS:
            return min(max(header.length, 1), self._missing.shape[1]), torch.int64
        if header.what == HIDDEN:
            return self._states
        _insist(0 <= header.what < len(self._units), "in other units")
        size, dtype = self._units[header.what]
        return len(self._blocks) * size, dtype

    def _keep(self, what: int, body: torch.Tensor) -> None:
        if what == TOKENS:
            self.tokens = from_bytes(body)
        elif what == HIDDEN:
            self.hidden = body.view(self._texts, -1)
        elif what == BLOCKS:
            _insist(bool(((body >= 0) & (body < self._missing.shape[1])).all()), "of other blocks")
            self._blocks = body
        else:
            self.pieces.append((what, self._blocks, body))
            self._missing[what, self._blocks] = False


def _insist(right: bool, fault: str) -> None:
    """Raise RuntimeError unless an answer is right."""
    if not right:
        raise RuntimeError(f"its answer is {fault}")
