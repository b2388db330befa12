"""The preview of a run's data, before weights are loaded: the first rows are rendered, checked and printed.

Knows tokenizer and template, no weights. DESIGN section 3.1.
"""

import json
import os
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

from eagle_train.corpus.arrow_files import Hub
from eagle_train.corpus.columns import BESIDE, FORMATS, unread_columns
from eagle_train.corpus.feed import BrokenTemplate, MalformedRow, refusal, render
from eagle_train.corpus.render import ChatRenderer, render_row
from eagle_train.corpus.rows import CAN_SKIP, PlacedRow, parse
from eagle_train.corpus.source import DataConfig, Source, SourceConfig, field_of, open_source
from eagle_train.corpus.tokens import Document
from eagle_train.distributed import CommonError, World
from eagle_train.errors import UserError, check
from eagle_train.results import write_text
from eagle_train.terminal import GREEN, RESET, printable

_CHECKED = 8  # rows of each data set that every run checks
_SEARCHED = 1000  # rows in which there must be a supervised token
_TRIES = 100  # rows that a preview tries for each row that it is to show
TOLD = 20  # refused rows whose reasons are printed


@dataclass
class Opened:
    """A data set to preview, with the field that names it."""

    field: str
    path: str | None
    config: SourceConfig
    source: Source


@dataclass
class Counts:
    """Counts over rendered rows. `refused`: reasons, each with the row's place. `unread`: notes on unread columns."""

    rows: int = 0
    divided: int = 0
    documents: int = 0
    tokens: int = 0
    produced: int = 0
    refused: list[str] = field(default_factory=list)
    unread: dict[str, None] = field(default_factory=dict)

    def add(self, documents: list[Document]) -> None:
        self.rows += 1
        self.divided += len(documents) > 1
        self.documents += len(documents)
        self.tokens += sum(document.tokens.numel() for document in documents)
        self.produced += sum(int(document.produced.sum()) for document in documents)

    def __str__(self) -> str:
        share = f" ({self.produced / self.tokens:.0%})" if self.tokens else ""
        lines = [
            f"{self.rows} rows shown: {self.documents} documents, {self.tokens:,} tokens, {self.produced:,} of them "
            f"supervised{share}; {self.divided} rows divided into a document for each turn, {len(self.refused)} refused"
        ]
        lines += [f"refused: {printable(' '.join(reason.split()))}" for reason in self.refused[:TOLD]]
        if len(self.refused) > TOLD:
            lines.append(f"refused: {len(self.refused) - TOLD:,} more")
        return "\n".join(lines)


def check_data(config: DataConfig, renderer: ChatRenderer, left_out: Collection[str] = ()) -> list[str]:
    """Render the first rows of every data set but those of the fields `left_out`. Returns notes for the user.

    Raises CommonError for a template that renders nothing, for a refused row (unless `data.malformed` skips them and
    other rows are fine), and for data in which the assistant says nothing.
    """
    notes = [note for opened in _opened_sources(config, left_out) for note in _check_source(opened, config, renderer)]
    return [*notes, *_notes_of(renderer)]


def check_same_data(config: DataConfig, world: World) -> None:
    """Raise CommonError unless the files of every data set have the same names and sizes on all ranks.

    Each rank reads rows for all, so other files on one node would be trained on without a word. Warns of data that all
    stream from the hub. All ranks call it.
    """
    if world.size == 1:
        return

    def look() -> tuple[dict[tuple[str, str | None], str], list[Opened]]:
        opened = list(_opened_sources(config))
        return {(each.field, each.path): each.source.identity() for each in opened}, opened

    own, opened = world.by_each(look)
    for each in opened if world.is_main else ():
        if isinstance(each.source, Hub) and not os.path.isdir(str(each.path)):
            warnings.warn(
                f"{each.field} is {each.path}; each of {world.size} processes reads all of it from the hub, in every "
                f"epoch; `hf download --repo-type dataset {each.path} --local-dir DIR` where all nodes see it, or "
                f"`save_to_disk` of datasets, and {each.field}=DIR reads it once",
                stacklevel=2,
            )
    first, *others = world.exchange(own)
    for rank, seen in enumerate(others, 1):
        for (name, path), identity in seen.items():
            check(
                identity == first[name, path],
                f"{name} is {path}; rank {rank} finds other files there than rank 0, by their names or sizes: give a "
                "directory that all nodes share, or the same copy on each",
                CommonError,
            )


def _opened_sources(config: DataConfig, left_out: Collection[str] = ()) -> Iterator[Opened]:
    for name, source in config.sources.items():
        if (key := field_of(name, "path")) not in left_out:
            yield Opened(key, source.path, source, open_source(source, name=name))
    if config.heldout is not None and (key := field_of("", "heldout")) not in left_out:
        yield Opened(key, config.heldout, config, open_source(config, "heldout"))


def _check_source(opened: Opened, config: DataConfig, renderer: ChatRenderer) -> list[str]:
    counts = Counts()
    for placed in islice(opened.source.rows(), _CHECKED):
        _add_row(placed, opened, config, renderer, counts)
    _check_any(counts, opened.field)
    if not counts.produced:
        _check_answers(opened, config, renderer)
    notes = []
    if counts.divided:
        notes.append(
            f"{opened.field} is {opened.path}; of its first {counts.rows} rows {counts.divided} are divided into "
            "a document for each of the assistant's turns: the chat template renders earlier turns differently"
        )
    return [*notes, *counts.unread]


def _add_row(placed: PlacedRow, opened: Opened, config: DataConfig, renderer: ChatRenderer, counts: Counts) -> None:
    """Render a row and count it. Raises CommonError as `check_data` does."""
    _note_unread_columns(placed, opened, counts)
    try:
        counts.add(render_row(parse(*placed), opened.config, renderer))
    except Exception as error:
        told = refusal(placed[0], error)
        if isinstance(told, BrokenTemplate):
            raise told from error
        if config.malformed == "refuse":
            raise MalformedRow(f"{told}; {CAN_SKIP}") from error
        counts.refused.append(str(told))


def _note_unread_columns(placed: PlacedRow, opened: Opened, counts: Counts) -> None:
    """Note the row's columns that look like data and are not read."""
    source, key = opened.config, opened.field.rpartition(".")[0]
    known = (*FORMATS[source.format], *BESIDE[source.format])
    try:
        names = unread_columns(parse(*placed), source.format, source.columns)
    except UserError:  # malformed: reported elsewhere
        return
    for name in names:
        how = f"{key}.columns.{name}={name} reads it" if name in known else f"{key}.columns maps {', '.join(known)}"
        counts.unread.setdefault(f"{opened.field} is {opened.path}; its column {name!r} is not read ({how})")


def _check_any(counts: Counts, field: str) -> None:
    """Raise CommonError if all checked rows were refused."""
    if counts.refused and not counts.rows:
        raise CommonError(
            f"{field}: all of the first {len(counts.refused)} rows are refused, for example {counts.refused[0]}"
        )


def _check_answers(opened: Opened, config: DataConfig, renderer: ChatRenderer) -> None:
    """Raise CommonError unless the first rows have a supervised token."""
    looked = 0
    for placed in islice(opened.source.rows(), _SEARCHED):
        looked += 1
        documents = render(placed, opened.config, renderer)
        if isinstance(documents, list) and any(produced.any() for _, produced in documents):
            return
    what = "data.assistant_pattern matches nothing" if opened.config.assistant_pattern else "the assistant says nothing"
    raise CommonError(
        f"{opened.field} is {opened.path}; {what} in its first {looked} rows, so there is no supervised token"
    )


def _notes_of(renderer: ChatRenderer) -> list[str]:
    """The renderer's notes, and notes on unused template variables and on the clock."""
    notes = list(renderer.notes)
    if renderer.tokenizer.chat_template is None:
        return notes
    known = renderer.template.variables() | renderer.template.variables([])
    unknown = [name for name in renderer.template.kwargs if name not in known]
    notes += [f"data.template_kwargs.{name}: the chat template reads no such variable" for name in unknown]
    if renderer.template.has_read_clock and renderer.template.date is not None:
        notes.append(
            f"the chat template reads the clock: it gets {renderer.template.date} throughout the run (data.date)"
        )
    return notes


def preview(config: DataConfig, renderer: ChatRenderer, number: int, out: str | None, in_color: bool) -> Iterator[str]:
    """Texts to print: the first `number` rows that can be rendered, of all data sets in turn, the supervised text in
    green or in brackets; then counts. With `out`, documents are also written as JSON objects, one a line.

    Raises UserError if no row can be rendered, CommonError for a template that renders nothing.
    """
    counts = Counts()
    lines: list[str] = []
    for opened, placed in islice(_rows_in_turn(config), _TRIES * number):
        if counts.rows == number:
            break
        _note_unread_columns(placed, opened, counts)
        try:
            documents = render_row(parse(*placed), opened.config, renderer)
        except Exception as error:
            told = refusal(placed[0], error)
            if isinstance(told, BrokenTemplate):
                raise told from error
            counts.refused.append(str(told))
            continue
        counts.add(documents)
        for document in documents:
            if not lines:
                yield f"The supervised text stands in {f'{GREEN}green{RESET}' if in_color else '[brackets]'}."
            described = description(placed[0], document, renderer)
            lines.append(json.dumps(described, ensure_ascii=False) + "\n")
            yield _shown_document(described, document, renderer, in_color)
    check(counts.rows > 0, f"preview={number}: no row can be rendered: {(counts.refused or ['there is none'])[0]}")
    if out is not None:
        write_text(Path(out), "".join(lines))
    yield str(counts)
    for note in (*counts.unread, *_notes_of(renderer)):
        warnings.warn(note, stacklevel=1)


def _rows_in_turn(config: DataConfig) -> Iterator[tuple[Opened, PlacedRow]]:
    waiting = [(opened, opened.source.rows()) for opened in _opened_sources(config)][: len(config.sources)]
    while waiting:
        rows = [(opened, rows, next(rows, None)) for opened, rows in waiting]
        yield from ((opened, placed) for opened, _, placed in rows if placed is not None)
        waiting = [(opened, more) for opened, more, placed in rows if placed is not None]


def description(place: str, document: Document, renderer: ChatRenderer) -> dict:
    """A document as JSON. `supervised`: ranges [start, end) of its tokens; `supervised_text`: their texts."""
    tokens = document.tokens.tolist()
    ranges = [list(span) for span, produced in _runs(document) if produced]
    texts = [renderer.decode(tokens[start:end], tokens[:start]) for start, end in ranges]
    return {"row": place, "text": document.text, "tokens": tokens, "supervised": ranges, "supervised_text": texts}


def _runs(document: Document) -> Iterator[tuple[tuple[int, int], bool]]:
    """Ranges [start, end) of tokens that are all produced, or all not, and which of the two."""
    start = 0
    for produced, group in groupby(document.produced.tolist()):
        end = start + len(list(group))
        yield (start, end), produced
        start = end


def _shown_document(described: dict, document: Document, renderer: ChatRenderer, in_color: bool) -> str:
    """A document for the terminal, control characters escaped."""
    before, after = (GREEN, RESET) if in_color else ("[", "]")
    pieces, tokens = [], described["tokens"]
    for (start, end), produced in _runs(document):
        text = printable(renderer.decode(tokens[start:end], tokens[:start]))
        pieces.append(f"{before}{text}{after}" if produced else text)
    count = int(document.produced.sum())
    return f"--- {printable(described['row'])}: {len(tokens)} tokens, {count} supervised\n{''.join(pieces)}"
