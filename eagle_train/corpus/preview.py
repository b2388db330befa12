"""What a run will learn, looked at before anything is loaded: the first rows are rendered, checked and shown.

Knows tokenizer and template, no weights. DESIGN section 3.1.
"""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path

from eagle_train.corpus.columns import BESIDE, FORMATS, unread_columns
from eagle_train.corpus.feed import BrokenTemplate, MalformedRow, render
from eagle_train.corpus.render import ChatRenderer, render_row
from eagle_train.corpus.rows import CAN_SKIP, PlacedRow, behind_place, parse
from eagle_train.corpus.source import DataConfig, Source, SourceConfig, field_of, open_source
from eagle_train.corpus.template import TemplateFault
from eagle_train.corpus.tokens import Document
from eagle_train.distributed import CommonError
from eagle_train.errors import UserError, check
from eagle_train.results import write_text
from eagle_train.terminal import GREEN, RESET, printable

CHECKED = 8  # rows of each data set that every run looks at
SEARCHED = 1000  # rows in which there must be something to learn
LOOKED = 100  # rows that a preview looks at in vain, for each that it is to show
TOLD = 20  # refused rows whose reasons are told


@dataclass
class Opened:
    """A data set to look at, by the field that names it."""

    field: str
    config: SourceConfig
    source: Source


@dataclass
class Seen:
    """What came of rows. `refused`: why rows were, each behind its place. `unread`: what is told of columns."""

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


def check_data(config: DataConfig, renderer: ChatRenderer) -> list[str]:
    """Render the first rows of every data set. Returns what the user should know, which ends nothing.

    Raises CommonError for a template that renders nothing, for a row that is refused (unless `data.malformed` wants
    such rows skipped and there are others), and for data in which the assistant says nothing.
    """
    notes = [note for opened in opened_sources(config) for note in check_source(opened, config, renderer)]
    return [*notes, *notes_of(renderer)]


def opened_sources(config: DataConfig) -> Iterator[Opened]:
    for name, source in config.sources.items():
        yield Opened(field_of(name, "path"), source, open_source(source, name=name))
    if config.heldout is not None:
        yield Opened(field_of("", "heldout"), config, open_source(config, "heldout"))


def check_source(opened: Opened, config: DataConfig, renderer: ChatRenderer) -> list[str]:
    seen = Seen()
    for placed in islice(opened.source.rows(), CHECKED):
        look_at(placed, opened, config, renderer, seen)
    check_any(seen, opened.field)
    if not seen.produced:
        check_answers(opened, config, renderer)
    notes = []
    if seen.divided:
        notes.append(
            f"{opened.field} is {path_of(opened)}; of its first {seen.rows} rows {seen.divided} are divided into a "
            "document for each of the assistant's turns: the chat template renders earlier turns in another way"
        )
    return [*notes, *seen.unread]


def path_of(opened: Opened) -> str | None:
    return opened.config.heldout if opened.field == "data.heldout" else opened.config.path


def look_at(placed: PlacedRow, opened: Opened, config: DataConfig, renderer: ChatRenderer, seen: Seen) -> None:
    """Render a row and count it. Raises CommonError as `check_data` does."""
    note_unread(placed, opened, seen)
    try:
        seen.add(render_row(parse(*placed), opened.config, renderer))
    except TemplateFault as fault:
        raise BrokenTemplate(str(fault)) from fault
    except UserError as error:
        told = behind_place(placed[0], error)
        if config.malformed == "refuse":
            raise MalformedRow(f"{told}; {CAN_SKIP}") from error
        seen.refused.append(told)


def note_unread(placed: PlacedRow, opened: Opened, seen: Seen) -> None:
    """Note the row's columns that look like data and are not read."""
    source, key = opened.config, opened.field.rpartition(".")[0]
    known = (*FORMATS[source.format], *BESIDE[source.format])
    try:
        names = unread_columns(parse(*placed), source.format, source.columns)
    except UserError:  # no row: told elsewhere
        return
    for name in names:
        how = f"{key}.columns.{name}={name} reads it" if name in known else f"{key}.columns maps {', '.join(known)}"
        seen.unread.setdefault(f"{opened.field} is {path_of(opened)}; its column {name!r} is not read ({how})")


def check_any(seen: Seen, field: str) -> None:
    """Raise CommonError where every row that was looked at was refused."""
    if seen.refused and not seen.rows:
        raise CommonError(f"{field}: all of the first {len(seen.refused)} rows are refused, as {seen.refused[0]}")


def check_answers(opened: Opened, config: DataConfig, renderer: ChatRenderer) -> None:
    """Raise CommonError unless there is something to learn in the first rows."""
    looked = 0
    for placed in islice(opened.source.rows(), SEARCHED):
        looked += 1
        documents = render(placed, opened.config, renderer)
        if isinstance(documents, list) and any(produced.any() for _, produced in documents):
            return
    what = "data.assistant_pattern matches nothing" if opened.config.assistant_pattern else "the assistant says nothing"
    raise CommonError(
        f"{opened.field} is {path_of(opened)}; {what} in its first {looked} rows, so there is no supervised token"
    )


def notes_of(renderer: ChatRenderer) -> list[str]:
    """What the renderer noticed of the template, and what it is given in vain."""
    notes = list(renderer.notes)
    if renderer.tokenizer.chat_template is None:
        return notes
    known = renderer.template.variables() | renderer.template.variables([])
    unknown = [name for name in renderer.template.kwargs if name not in known]
    notes += [f"data.template_kwargs.{name}: the chat template reads no such variable" for name in unknown]
    if renderer.template.was_told_the_day and renderer.template.date is not None:
        notes.append(
            f"the chat template reads the clock: it is told {renderer.template.date} throughout the run (data.date)"
        )
    return notes


def preview(config: DataConfig, renderer: ChatRenderer, number: int, out: str | None, in_color: bool) -> Iterator[str]:
    """The first `number` rows that can be rendered, of all data sets in turn, as text to print, what is learnt in green
    or in brackets; then what came of the rows. With `out`, also as a JSON object a line for each document.

    Raises UserError where none can be rendered, CommonError for a template that renders nothing.
    """
    seen, lines = Seen(), []
    for opened, placed in islice(rows_in_turn(config), LOOKED * number):
        if seen.rows == number:
            break
        note_unread(placed, opened, seen)
        try:
            documents = render_row(parse(*placed), opened.config, renderer)
        except TemplateFault as fault:
            raise BrokenTemplate(str(fault)) from fault
        except UserError as error:
            seen.refused.append(behind_place(placed[0], error))
            continue
        seen.add(documents)
        for document in documents:
            if not lines:
                yield f"The supervised text stands in {f'{GREEN}green{RESET}' if in_color else '[brackets]'}."
            described = description(placed[0], document, renderer)
            lines.append(json.dumps(described, ensure_ascii=False) + "\n")
            yield shown_document(described, document, renderer, in_color)
    check(seen.rows > 0, f"preview={number}: no row can be rendered, as {(seen.refused or ['there is none'])[0]}")
    if out is not None:
        write_text(Path(out), "".join(lines))
    yield str(seen)
    for note in (*seen.unread, *notes_of(renderer)):
        warnings.warn(note, stacklevel=1)


def rows_in_turn(config: DataConfig) -> Iterator[tuple[Opened, PlacedRow]]:
    waiting = [(opened, opened.source.rows()) for opened in opened_sources(config)][: len(config.sources)]
    while waiting:
        rows = [(opened, rows, next(rows, None)) for opened, rows in waiting]
        yield from ((opened, placed) for opened, _, placed in rows if placed is not None)
        waiting = [(opened, more) for opened, more, placed in rows if placed is not None]


def description(place: str, document: Document, renderer: ChatRenderer) -> dict:
    """A document for a file: `supervised` are ranges [start, end) of its tokens, `supervised_text` what each says."""
    tokens = document.tokens.tolist()
    ranges = [list(span) for span, produced in runs(document) if produced]
    texts = [renderer.decode(tokens[start:end], tokens[:start]) for start, end in ranges]
    return {"row": place, "text": document.text, "tokens": tokens, "supervised": ranges, "supervised_text": texts}


def runs(document: Document) -> Iterator[tuple[tuple[int, int], bool]]:
    """Ranges [start, end) of tokens that are all produced, or all not."""
    start = 0
    for produced, group in groupby(document.produced.tolist()):
        end = start + len(list(group))
        yield (start, end), produced
        start = end


def shown_document(described: dict, document: Document, renderer: ChatRenderer, in_color: bool) -> str:
    """A document as a terminal may be sent it, whatever its text."""
    before, after = (GREEN, RESET) if in_color else ("[", "]")
    pieces, tokens = [], described["tokens"]
    for (start, end), produced in runs(document):
        text = printable(renderer.decode(tokens[start:end], tokens[:start]))
        pieces.append(f"{before}{text}{after}" if produced else text)
    count = int(document.produced.sum())
    return f"--- {printable(described['row'])}: {len(tokens)} tokens, {count} supervised\n{''.join(pieces)}"
