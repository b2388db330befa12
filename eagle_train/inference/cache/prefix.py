"""The committed slots of a batch's rows: length, block table, and the slots of positions.

Knows nothing of keys, values, models or requests. DESIGN section 3.6.

Shapes: A active rows, W blocks of a row, T tokens.
"""

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from eagle_train.ops.transfer import to_device

BLOCK = 16  # slots of a block
# Reserved blocks. ZEROS is never written, and is gathered for slots beyond a row's length: stale values there may be
# NaN, which a mask does not hide. Padding writes its keys and values to SCRATCH, which nothing reads.
ZEROS, SCRATCH = 0, 1


class RowRange(NamedTuple):
    """Rows of a batch whose slots are ranges: row `rows.start + i` begins at slot `first + i * spacing`."""

    rows: slice
    first: int
    spacing: int


class Prefix:
    """The number of committed slots of each active row, and its block table, blocks of the next round included.

    `Prefix.of` picks the subclass: ContiguousPrefix for one row whose slots are a range, else PagedPrefix.
    """

    longest: int  # on the host: the greatest of the lengths, or an upper bound
    shortest: int  # on the host: the least of the lengths, or a lower bound
    ragged: bool  # False: every length is `longest`

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [A]: committed slots of each row."""
        raise NotImplementedError

    @cached_property
    def blocks(self) -> torch.Tensor:
        """int64 [A, W]: the block table, each row's blocks in the order of its tokens, padded with SCRATCH."""
        raise NotImplementedError

    @staticmethod
    def of(
        lengths: list[int], blocks: list[list[int]], device: torch.device, on_device: torch.Tensor | None = None
    ) -> "Prefix":
        """From each row's length and blocks. `on_device`: the lengths int64 [A], if they are on the device already."""
        if len(blocks) == 1 and blocks[0] == list(range(blocks[0][0], blocks[0][0] + len(blocks[0]))):
            return ContiguousPrefix(lengths[0], blocks[0], device, on_device)
        width = max(map(len, blocks))
        table = to_device([row + [SCRATCH] * (width - len(row)) for row in blocks], device)
        tensor = to_device(lengths, device) if on_device is None else on_device
        return PagedPrefix(tensor, table, max(lengths), len(set(lengths)) > 1, min(lengths), blocks)

    def with_lengths(self, lengths: list[int]) -> "Prefix":
        """The same rows with other lengths."""
        tensor, ragged = to_device(lengths, self.lengths.device), len(set(lengths)) > 1
        return PagedPrefix(tensor, self.blocks, max(lengths), ragged, min(lengths), self.host_blocks)

    def with_device_lengths(self, lengths: torch.Tensor, longest: int, shortest: int = 0) -> "Prefix":
        """The same rows with lengths int64 [A] that are on the device only, `shortest` to `longest` each."""
        return PagedPrefix(lengths, self.blocks, longest, True, shortest, self.host_blocks)

    def rows(self, order: list[int]) -> "Prefix":
        """The rows `order`, in this order. `longest` and `shortest` stay bounds of all rows."""
        index = to_device(order, self.lengths.device, torch.long)
        host = None if self.host_blocks is None else [self.host_blocks[row] for row in order]
        return PagedPrefix(self.lengths[index], self.blocks[index], self.longest, True, self.shortest, host)

    def advanced(self, tokens: int) -> "Prefix":
        """The same rows, each longer by `tokens`."""
        longest, shortest = self.longest + tokens, self.shortest + tokens
        return PagedPrefix(self.lengths + tokens, self.blocks, longest, self.ragged, shortest, self.host_blocks)

    def with_scratch(self, tokens: int) -> "Prefix":
        """The same rows where `tokens` more than the rows have blocks for may follow: padding, in SCRATCH."""
        return self

    @property
    def host_blocks(self) -> list[list[int]] | None:
        """Each row's blocks; None where only the device knows them."""
        raise NotImplementedError

    def ranges(self, slots: int) -> list[RowRange]:
        """Where each row's first `slots` slots lie, in the order of the rows; empty if a row's are no range or only the
        device knows."""
        return []

    def positions(self, count: int) -> torch.Tensor:
        """The positions of each row's next `count` tokens, int64 [A, count]."""
        return self.lengths.unsqueeze(1) + torch.arange(count, device=self.lengths.device)

    def next_slots(self, positions: torch.Tensor) -> torch.Tensor | slice:
        """As `slots`, of positions [A, T] that directly follow the prefix; a slice where the slots are a range."""
        return self.slots(positions)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """The store's slots of positions [A, T], int64 [A, T]; of SCRATCH for positions beyond a row's blocks, which
        are padding."""
        place = positions // BLOCK  # column of the block table
        block = self.blocks.gather(1, place.clamp(max=self.blocks.shape[1] - 1))
        block = block.masked_fill(place >= self.blocks.shape[1], SCRATCH)
        return block * BLOCK + positions % BLOCK


class PagedPrefix(Prefix):
    """The general case: lengths and block table are tensors."""

    host_blocks: list[list[int]] | None = None

    def __init__(
        self,
        lengths: torch.Tensor,
        blocks: torch.Tensor,
        longest: int,
        ragged: bool,
        shortest: int = 0,
        host_blocks: list[list[int]] | None = None,
    ):
        self.lengths, self.blocks, self.longest, self.ragged = lengths, blocks, longest, ragged
        self.shortest, self.host_blocks = shortest, host_blocks

    def with_scratch(self, tokens: int) -> "PagedPrefix":
        blocks = F.pad(self.blocks, (0, -(-tokens // BLOCK)), value=SCRATCH)
        return PagedPrefix(self.lengths, blocks, self.longest, self.ragged, self.shortest, self.host_blocks)

    def ranges(self, slots: int) -> list[RowRange]:
        rows, count = self.host_blocks or [], -(-slots // BLOCK)
        if any(row[:count] != list(range(row[0], row[0] + count)) for row in rows):
            return []
        return _equally_spaced([row[0] * BLOCK for row in rows])


class ContiguousPrefix(Prefix):
    """One row with consecutive blocks and a length that is known on the host: its slots are a range.

    Keys and values are read as views, without a gather; the tensors of `Prefix` are made on first use.
    """

    ragged = False

    def __init__(self, length: int, blocks: list[int], device: torch.device, on_device: torch.Tensor | None = None):
        """`blocks`: consecutive. `on_device`: the length int64 [1], if it is on the device already."""
        self.longest = self.shortest = length
        self.first_slot = blocks[0] * BLOCK
        self._row, self._device, self._on_device = blocks, device, on_device

    @cached_property
    def lengths(self) -> torch.Tensor:
        return to_device([self.longest], self._device) if self._on_device is None else self._on_device

    @cached_property
    def blocks(self) -> torch.Tensor:
        return to_device([self._row], self._device)

    @property
    def host_blocks(self) -> list[list[int]]:
        return [self._row]

    @property
    def capacity(self) -> int:
        """The number of the row's slots."""
        return len(self._row) * BLOCK

    def with_lengths(self, lengths: list[int]) -> "ContiguousPrefix":
        return ContiguousPrefix(lengths[0], self._row, self._device)

    def advanced(self, tokens: int) -> "ContiguousPrefix":
        return ContiguousPrefix(self.longest + tokens, self._row, self._device)

    def positions(self, count: int) -> torch.Tensor:
        return torch.arange(self.longest, self.longest + count, device=self._device).unsqueeze(0)

    def next_slots(self, positions: torch.Tensor) -> torch.Tensor | slice:
        count, first = positions.shape[1], self.first_slot + self.longest
        return slice(first, first + count) if self._has_room(count) else super().slots(positions)

    def slots(self, positions: torch.Tensor) -> torch.Tensor:
        """As `Prefix.slots`, of any positions of the row, and of T that directly follow the prefix; not of others
        beyond its blocks."""
        has_room = self._has_room(positions.shape[1])
        return positions + self.first_slot if has_room else super().slots(positions)

    def _has_room(self, count: int) -> bool:
        return self.longest + count <= self.capacity


def _equally_spaced(firsts: list[int]) -> list[RowRange]:
    """Rows that begin at these slots, as few ranges with a positive spacing each."""
    found: list[RowRange] = []
    start = 0
    while start < len(firsts):
        steps = [b - a for a, b in pairwise(firsts[start:])]
        spacing = steps[0] if steps and steps[0] > 0 else 0
        more = next((i for i, step in enumerate(steps) if step != spacing), len(steps)) if spacing else 0
        found.append(RowRange(slice(start, start + more + 1), firsts[start], spacing))
        start += more + 1
    return found
