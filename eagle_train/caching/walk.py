"""The rows of a run's first pass over its data, in the order in which it trains on them, and which documents are first
met in each. Knows nothing of states.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from eagle_train.corpus.stream import Batch, PackedRow, Stream, collate
from eagle_train.distributed import World
from eagle_train.models.state_files import key_of

_BEYOND = 64  # rows behind the data's end in which rows that are still open are looked for


@dataclass(frozen=True)
class Found:
    """A document that is first met: its place [row, start, end) in its batch, and its key."""

    row: int
    start: int
    end: int
    key: bytes


@dataclass(frozen=True, eq=False)
class WalkedBatch(Batch):
    """A batch with the documents that are first met in it. `is_wanted`: whether its states are to be computed."""

    found: list[Found]
    is_wanted: bool


@dataclass
class Totals:
    """Documents that were met, of all ranks, their tokens, and the tokens whose final hidden state is kept."""

    documents: int = 0
    tokens: int = 0
    kept: int = 0


class Walk:
    """A stream of a run's batches as `Lookahead` draws them, up to the end of a pass; empty rows follow.

    A pass is over when each data set was read once and no open row holds a document that was not met, or after
    `most_rows` rows of all ranks. `known`: keys of documents that are met already; those that are met are added.
    `together`: whether ranks compute each forward together. `is_whole`: whether all documents of the data were met.
    """

    def __init__(
        self, stream: Stream, known: set[bytes], supervised_only: bool, most_rows: int | None, together: bool = False
    ):
        self.stream, self.known, self.totals = stream, known, Totals()
        self.is_over, self.is_whole, self.rows = False, False, 0
        self._supervised_only, self._most_rows, self._together = supervised_only, most_rows, together
        self._beyond, self._rest = 0, deque[PackedRow]()

    @property
    def config(self) -> Any:
        return self.stream.config

    @property
    def world(self) -> World:
        return self.stream.world

    def state_dict(self) -> dict[str, Any]:
        """What the consumer of a step is to know: whether the pass is over with it, and whether it is whole."""
        return {"is_over": self.is_over, "is_whole": self.is_whole}

    def close(self) -> None:
        self.stream.close()

    def __next__(self) -> WalkedBatch:
        """This rank's next batch."""
        count = self.stream.micro_batch_rows
        rows = self._drawn(count * self.world.size)
        batches = [self.marked(rows[first : first + count]) for first in range(0, len(rows), count)]
        own = batches[self.world.rank]
        wanted = any(batch.found for batch in (batches if self._together else [own]))
        self.is_over = self.is_over or self._ends()
        return WalkedBatch(own.tokens, own.positions, own.supervised, own.lengths, own.found, wanted)

    def marked(self, rows: list[PackedRow]) -> WalkedBatch:
        """These rows as a batch, their documents met."""
        found = []
        for number, row in enumerate(rows):
            for start, end, key in self._keys(row):
                if key not in self.known:
                    self.known.add(key)
                    self._count(row.supervised[start:end])
                    found.append(Found(number, start, end, key))
        batch = collate(rows)
        return WalkedBatch(batch.tokens, batch.positions, batch.supervised, batch.lengths, found, bool(found))

    def _count(self, supervised: torch.Tensor) -> None:
        tokens = len(supervised)
        self.totals.documents += 1
        self.totals.tokens += tokens
        self.totals.kept += int(supervised.sum()) if self._supervised_only else tokens

    def _keys(self, row: PackedRow) -> list[tuple[int, int, bytes]]:
        """Start, end and key of each of a row's documents."""
        found, start = [], 0
        for length in row.lengths:
            end = start + length
            supervised = row.supervised[start:end] if self._supervised_only else None
            found.append((start, end, key_of(row.tokens[start:end], supervised)))
            start = end
        return found

    def _drawn(self, number: int) -> list[PackedRow]:
        if self.is_over or self._rest:
            rows = [self._rest.popleft() for _ in range(min(number, len(self._rest)))]
        else:
            rows = self.stream.draw(number)
        self.rows += len(rows)
        return rows + [PackedRow.empty(self.config.row_tokens) for _ in range(number - len(rows))]

    def _ends(self) -> bool:
        """Whether the pass is over with the rows so far.

        Rows that are open at the data's end are filled by the next epoch, as a run's are; those of a data set that
        fills them late are given out as they are.
        """
        self.is_whole = self._has_met_all()
        if self.is_whole or (self._most_rows is not None and self.rows >= self._most_rows):
            return True
        if self._beyond >= _BEYOND or not self._has_read_all():
            return False
        self._beyond += self.stream.micro_batch_rows * self.world.size
        if self._beyond >= _BEYOND:
            self._rest.extend([*self.stream.ready, *self.stream.packer.flush()])
        return False

    def _has_read_all(self) -> bool:
        return all(epoch >= 1 for epoch, _ in self.stream.position.sources.values())

    def _has_met_all(self) -> bool:
        if not self._has_read_all() or self._beyond >= _BEYOND:
            return self._beyond >= _BEYOND and not self._rest
        waiting = [*self.stream.ready, *self.stream.packer.open]
        return all(key in self.known for row in waiting for _, _, key in self._keys(row))
