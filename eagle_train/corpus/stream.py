"""An endless, resumable stream of packed batches, the same for any number of ranks.

Every document starts at position 0 in its packed row (DESIGN 3.1). Knows nothing of file formats, templates or models.

Shapes: B rows of a batch, N tokens of a row (`data.row_tokens`).
"""

import copy
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from typing import Any

import torch

from eagle_train.corpus.feed import Drawn, Feed, MalformedRow, Position, received, render
from eagle_train.corpus.render import ChatRenderer
from eagle_train.corpus.source import MIN_TOKENS, DataConfig, open_source
from eagle_train.corpus.tokens import Document
from eagle_train.distributed import ALONE, CommonError, World
from eagle_train.errors import check, typed

_OPEN_ROWS = 16  # rows kept open for a document that fits; more give less padding and a larger state
_COUNTED = 20_000  # rows in which tokens are counted for a draft's vocabulary
_COUNTS = ("rows", "divided", "documents", "tokens", "padding", "split", "dropped", "mute", "skipped", "malformed")
_FEW_MALFORMED, _MOST_MALFORMED = 100, 0.1  # number and share of rows beyond which the config must be wrong
_REPORTED = 10  # malformed rows that are reported
_MANY = 20  # documents before a warning that most of them are mute


TENSORS = ("tokens", "positions", "supervised")  # of a batch


@dataclass(frozen=True, eq=False)
class Batch:
    """Packed rows. `lengths`: of each row's segments, summing to N; padding is the last segment.

    tokens int64 [B,N] (padding: 0); positions int64 [B,N], from 0 in each segment; supervised bool [B,N]: slot j of a
    document is supervised when j >= 1 and token j+1 exists and was produced.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    supervised: torch.Tensor
    lengths: list[list[int]]


@dataclass
class PackedRow:
    """A row being filled: tokens int64 [N], supervised bool [N], and the lengths of its documents so far."""

    tokens: torch.Tensor
    supervised: torch.Tensor
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, size: int) -> "PackedRow":
        return cls(torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.bool))

    @property
    def room(self) -> int:
        return self.tokens.numel() - sum(self.lengths)  # hot: len() of a tensor takes 15 times as long

    @property
    def segments(self) -> list[int]:
        return [*self.lengths, self.room] if self.room else list(self.lengths)

    def append(self, tokens: torch.Tensor, supervised: torch.Tensor) -> None:
        start, length = sum(self.lengths), tokens.numel()
        self.tokens[start : start + length], self.supervised[start : start + length] = tokens, supervised
        self.lengths.append(length)


class Packer:
    """Documents in, full packed rows out, with counts.

    `counts`: rows of the data, those divided into a document for each turn, and documents; tokens and padding of
    packed rows; documents split and dropped for their length; mute documents, in which nothing is produced; documents
    and pieces skipped because they have no supervised slot, the mute ones included; malformed rows, which are in no
    other count.
    """

    def __init__(self, config: DataConfig):
        self.config = config
        self.open: list[PackedRow] = []
        self.counts = dict.fromkeys(_COUNTS, 0)

    def add(self, documents: list[Document] | MalformedRow) -> list[PackedRow]:
        """Pack a row's documents; returns the packed rows that this fills. Raises CommonError for too many malformed
        rows."""
        if isinstance(documents, MalformedRow):
            self.counts["malformed"] += 1
            malformed, rows = self.counts["malformed"], self.counts["malformed"] + self.counts["rows"]
            most = max(_FEW_MALFORMED, _MOST_MALFORMED * rows)
            if malformed > most:
                raise CommonError(
                    f"data.malformed=skip: {malformed} of {rows} rows are malformed, for example {documents}"
                )
            return []
        self.counts["rows"] += 1
        self.counts["divided"] += len(documents) > 1
        self.counts["documents"] += len(documents)
        self.counts["mute"] += sum(not document.produced.any() for document in documents)
        return [full for document in documents for piece in self._pieces(document) for full in self.pack(piece)]

    def _pieces(self, document: Document) -> list[Document]:
        """The document; of one longer than a row its pieces, or nothing."""
        size = self.config.row_tokens
        if document.tokens.numel() <= size:
            return [document]
        if self.config.long_documents == "drop":
            self.counts["dropped"] += 1
            return []
        self.counts["split"] += 1
        parts = zip(document.tokens.split(size), document.produced.split(size), strict=True)
        return [Document(tokens, produced) for tokens, produced in parts]

    def pack(self, document: Document) -> list[PackedRow]:
        """Put the document into the open row with the least room for it; returns the rows that are then full."""
        supervised = _supervised_slots(document)
        if not supervised.any():
            self.counts["skipped"] += 1
            return []
        done = []
        fitting = [(room, row) for row in self.open if (room := row.room) >= supervised.numel()]
        if not fitting:
            if len(self.open) == _OPEN_ROWS:
                done.append(self.close(min(self.open, key=lambda row: row.room)))
            row = PackedRow.empty(self.config.row_tokens)
            self.open.append(row)
            fitting = [(row.room, row)]
        _, best = min(fitting, key=lambda pair: pair[0])
        best.append(document.tokens, supervised)
        if best.room < MIN_TOKENS:
            done.append(self.close(best))
        return done

    def slots_of(self, documents: list[Document]) -> list[torch.Tensor]:
        """Supervised slots, bool [n], of each piece of these documents that would be packed."""
        pieces = (piece for document in documents for piece in self._pieces(document))
        return [slots for slots in map(_supervised_slots, pieces) if slots.any()]

    def close(self, row: PackedRow) -> PackedRow:
        self.open = [other for other in self.open if other is not row]
        self.counts["tokens"] += sum(row.lengths)
        self.counts["padding"] += row.room
        return row

    def flush(self) -> list[PackedRow]:
        """The rows that are still open, partly filled."""
        return [self.close(row) for row in self.open]


def _supervised_slots(document: Document) -> torch.Tensor:
    """bool [n]: slots j >= 1 whose next token exists and was produced. DESIGN section 3.1."""
    supervised = torch.zeros_like(document.produced)
    supervised[1:-1] = document.produced[2:]
    return supervised


def collate(rows: list[PackedRow]) -> Batch:
    """Packed rows as one batch."""
    lengths = [row.segments for row in rows]
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    return Batch(
        tokens=torch.stack([row.tokens for row in rows]),
        positions=torch.stack(positions),
        supervised=torch.stack([row.supervised for row in rows]),
        lengths=lengths,
    )


class Stream:
    """Batches of `micro_batch_rows` packed rows for each rank, without end.

    All ranks draw the same rows and each takes its share, so a step's rows are the same for any number of ranks.
    Raises UserError for data that cannot be read (with the row's place), and CommonError for data without a supervised
    token.
    """

    def __init__(self, config: DataConfig, renderer: ChatRenderer, micro_batch_rows: int, world: World = ALONE):
        assert micro_batch_rows > 0
        self.config, self.world = config, world
        self.feed = Feed(config, renderer, world)
        self.packer = Packer(config)
        self.micro_batch_rows = micro_batch_rows
        self.ready: list[PackedRow] = []
        self.has_warned = False
        self.position = self.feed.start()
        self.documents = self.feed.documents(copy.deepcopy(self.position))

    @property
    def counts(self) -> dict[str, int]:
        """`Packer.counts` since the stream's first batch, on all ranks together."""
        return self.packer.counts

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Batch:
        """This rank's next batch."""
        count, rank = self.micro_batch_rows, self.world.rank
        rows = self.draw(count * self.world.size)
        return collate(rows[rank * count : (rank + 1) * count])

    def draw(self, number: int) -> list[PackedRow]:
        """The job's next packed rows."""
        while len(self.ready) < number:
            drawn, documents = next(self.documents)
            self._advance(drawn)
            self.ready += self.packer.add(documents)
            if isinstance(documents, MalformedRow) and self.world.is_main and self.counts["malformed"] <= _REPORTED:
                warnings.warn(f"left out: {documents}", stacklevel=1)
            if self.world.is_main:
                self._warn_of_mute()
        rows, self.ready = self.ready[:number], self.ready[number:]
        return rows

    def _warn_of_mute(self) -> None:
        """Warn once if most documents have nothing to learn: their speakers may have unknown names."""
        if self._mute_warning and not self.has_warned:
            self.has_warned = True
            warnings.warn(self._mute_warning, stacklevel=1)

    @property
    def _mute_warning(self) -> str | None:
        """The warning if most documents are mute, None otherwise."""
        mute, documents = self.counts["mute"], self.counts["documents"]
        if documents < _MANY or mute <= documents / 2:
            return None
        return f"{self._data}; in {mute} of {documents} documents the assistant says nothing: skipped"

    @property
    def _data(self) -> str:
        """The setting that gives the data, for messages."""
        mix = self.config.mix
        return f"data.mix is {', '.join(mix)}" if mix else f"data.path is {self.config.path}"

    def _advance(self, drawn: Drawn) -> None:
        """Advance the position. Raises CommonError after an epoch without a supervised token."""
        packed = self.ready or self.packer.open or self.counts["tokens"] or drawn.epoch == 0
        check(bool(packed), f"{self._data}; it has no supervised token: {self.counts}", CommonError)
        self.position.drawn += 1
        self.position.sources[drawn.source] = [drawn.epoch, drawn.number]

    def frequent_tokens(self, number: int) -> list[int]:
        """The ids of the tokens that are most often produced in the first documents, ascending; equal on every rank.

        Counts `_COUNTED` rows at most, in the order of their draws, until every source was read once, and does not
        advance the stream: what is drawn often counts often. Of equally frequent tokens the lower ids come first.
        """
        counts: Counter[int] = Counter()
        unread = set(self.config.sources)
        for drawn, documents in islice(self.feed.documents(self.feed.start()), _COUNTED):
            if drawn.epoch > 0:
                unread.discard(drawn.source)
            if not unread:
                break
            if isinstance(documents, MalformedRow):
                continue
            for document in documents:
                counts.update(document.tokens[document.produced].tolist())
        # Filled up with tokens that did not occur.
        ranked = sorted(counts, key=lambda token: (-counts[token], token))[:number]
        unseen = (token for token in count() if token not in counts)
        return sorted([*ranked, *islice(unseen, number - len(ranked))])

    def close(self) -> None:
        """End the tokenising processes."""
        self.feed.close()

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch: plain values and tensors, safe for weights_only."""
        return {
            "made_of": self.made_of(),
            "position": asdict(self.position),
            "marks": self.feed.marks(self.position),
            "counts": dict(self.counts),
            "open": [asdict(row) for row in self.packer.open],
            "ready": [asdict(row) for row in self.ready],
        }

    def check_same(self, state: dict[str, Any]) -> None:
        """Raise UserError for a state of other data or another data config."""
        for key, value in self.made_of().items():
            saved = state["made_of"].get(key)
            check(
                saved == value,
                f"data.{key} is {typed(value)}, but was {typed(saved)} when the checkpoint was written: "
                "resume with the same data",
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `state` was taken: the same batches follow, bit for bit.

        The micro-batch size and the number of ranks may differ. Raises UserError as `check_same` does.
        """
        self.check_same(state)
        state = copy.deepcopy(state)
        self.position = Position(**state["position"])
        self.packer.counts = state["counts"]
        self.packer.open = [PackedRow(**row) for row in state["open"]]
        self.ready = [PackedRow(**row) for row in state["ready"]]
        self.feed.remember(state["marks"])
        self.documents = self.feed.documents(copy.deepcopy(self.position))

    def made_of(self) -> dict[str, Any]:
        """All that the order and the contents of batches depend on."""
        values = asdict(self.config)
        for key in ("heldout", "heldout_revision", "workers", "prefetch", "malformed"):
            del values[key]
        for source in (values["mix"] or {}).values():
            if source["revision"] is None:  # as in checkpoints from before there was one
                del source["revision"]
        renderer = self.feed.renderer
        values["date"] = renderer.template.date if renderer.reads_clock else None
        files, template = self.feed.identity(), renderer.identity()
        return {**values, "path (names and sizes of the files)": files, "path (the chat template)": template}


def heldout_batches(config: DataConfig, renderer: ChatRenderer, rows: int, number: int) -> list[Batch]:
    """The first `number` batches of config.heldout in its own order, `rows` packed rows a batch; no more is read.

    The last batch of the data may have empty rows. Without heldout data there are no batches. Raises UserError as
    `Stream` does.
    """
    if config.heldout is None:
        return []
    packer = Packer(config)
    packed = list(islice(_heldout_rows(config, renderer, packer), rows * number))
    check(bool(packed), f"data.heldout is {config.heldout}; it has no supervised token: {packer.counts}")
    packed += [PackedRow.empty(config.row_tokens) for _ in range(-len(packed) % rows)]
    return [collate(packed[i : i + rows]) for i in range(0, len(packed), rows)]


def _heldout_rows(config: DataConfig, renderer: ChatRenderer, packer: Packer) -> Iterator[PackedRow]:
    """Packed rows of one pass over config.heldout."""
    for placed in open_source(config, "heldout").rows():
        yield from packer.add(received(render(placed, config, renderer), config))
    yield from packer.flush()
