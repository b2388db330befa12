"""Rows of the user's data, streamed from JSONL, Parquet or a hub data set, and the config that says which.

Knows nothing of tokens: a row is handed on with its place (file and line, or row number) for error messages.
"""

import glob
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from eagle_train.config import UserError, check, one_line
from eagle_train.corpus.chat import BESIDE, FORMATS, ROLES, SUPERVISE
from eagle_train.corpus.template import as_date, check_template_kwargs

JSONL_SUFFIXES = tuple(suffix + packed for suffix in (".jsonl", ".json", ".ndjson") for packed in ("", ".gz"))
FILE_SUFFIXES = (*JSONL_SUFFIXES, ".parquet")
BATCH_ROWS = 256  # of Arrow, in memory at a time
LONG_DOCUMENTS = ("split", "drop")
MALFORMED = ("refuse", "skip")
CAN_SKIP = "data.malformed=skip leaves such rows out"
MARK_ROWS = 4096  # of JSONL, about as many as are read in vain when a run goes on
MIN_TOKENS = 3  # a shorter document has no supervised slot (DESIGN section 3.1)

Row = dict[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class ArrowRow:
    """A row of a batch of Arrow's, not yet one of Python's: that takes longer than reading it."""

    batch: Any  # pyarrow.RecordBatch
    number: int
    decode: Callable[[Row], Row] = lambda row: row

    def read(self) -> Row:
        return self.decode(self.batch.slice(self.number, 1).to_pylist()[0])

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process the row goes alone; pyarrow would send the batch."""
        return dict, (self.read(),)


PlacedRow = tuple[str, Row | bytes | ArrowRow]  # as it was read: whoever needs the row parses it, see `parse`

Mark = tuple[int, int, int, int]
"""Where a row of JSONL lies: its number, its file's, and how many bytes and lines of the file are before it."""


@dataclass
class SourceConfig:
    """One data set of `data.mix`, and what `data` itself says of its only one.

    `path`: a JSONL or Parquet file, a glob of either, or a hub data set (or its local directory), of which `name` is
    the config and `split` the split. Relative paths are relative to the working directory. `columns`: the format's
    keys (`chat.FORMATS`, `chat.BESIDE`) to the row's columns, None for one that is not to be read. `roles`: who else
    speaks than `chat.ROLES` knows, whatever the case, and as what. `assistant_pattern`: a regular expression that says
    what of a text the assistant wrote, its first group if it has one. `weight`: how often its documents are drawn
    beside the others'.
    """

    path: str | None = None
    format: str = "messages"
    columns: dict[str, str | None] = field(default_factory=dict)
    roles: dict[str, str] | None = None
    assistant_pattern: str | None = None
    name: str | None = None
    split: str = "train"
    weight: float = 1.0

    def check(self, key: str) -> None:
        """Raise UserError, naming the field below `key`, for values that cannot be."""
        known = FORMATS.get(self.format)
        check(known is not None, f"{key}.format is {self.format!r}; it must be one of {', '.join(FORMATS)}")
        known = known if self.format == "text" else (*known, *BESIDE)
        for column, name in self.columns.items():
            wanted = f"{key}.format={self.format} reads {', '.join(known)}"
            check(column in known, f"{key}.columns.{column} is unknown; {wanted}")
            check(bool(name) or column in BESIDE, f"{key}.columns.{column} is {name!r}; it must name a column")
        for speaker, role in (self.roles or {}).items():
            check(bool(role), f"{key}.roles.{speaker} is {role!r}; it must be a role, user or assistant, say")
        self.check_pattern(key)
        check(bool(self.path), f"{key}.path is missing; give a file, a glob or a hub data set")
        check(self.weight > 0, f"{key}.weight is {self.weight}; it must be above 0")

    def check_pattern(self, key: str) -> None:
        if self.assistant_pattern is None:
            return
        field = f"{key}.assistant_pattern is {self.assistant_pattern!r}"
        check(self.format == "text", f"{field}; it is for {key}.format=text, not {self.format}")
        try:
            re.compile(self.assistant_pattern)
        except re.error as error:
            raise UserError(f"{field}; it is no regular expression: {one_line(error)}") from error

    @property
    def speakers(self) -> dict[str, str]:
        """Roles by who speaks, in lower case."""
        return ROLES | {speaker.lower(): role for speaker, role in (self.roles or {}).items()}


@dataclass
class DataConfig(SourceConfig):
    """The group `data`. Raises UserError for values that cannot be.

    `mix`: data sets by name, drawn by weight, instead of the one at `path`; each starts anew when it is through.
    `heldout`: a path as `path`, of the same format, or None. `row_tokens`: length of a packed row; a longer document
    is, by `long_documents`, split or dropped. `malformed`: whether a row that is none ends the run, or is left out and
    counted. `shuffle_window`: rows shuffled among themselves; 0 keeps the data's
    order. `supervise`: what counts as produced in a conversation (all of the assistant's turns, its last, or every
    token); all of a text does, unless there is a pattern. `template_kwargs`: the chat template's own variables. `date`:
    the day that a template is told when it reads the clock; None: today, and when a run goes on, the day it began.
    `workers`: processes of each rank that tokenise, 0 for none but its own. `prefetch`: optimiser steps drawn ahead.
    """

    mix: dict[str, SourceConfig] | None = None
    heldout: str | None = None
    supervise: str = "assistant"
    template_kwargs: dict[str, Any] | None = None
    date: str | None = None
    row_tokens: int = 2048
    long_documents: str = "split"
    malformed: str = "refuse"
    shuffle_window: int = 4096
    seed: int = 0
    workers: int = 0
    prefetch: int = 2

    def __post_init__(self) -> None:
        for key, allowed in (("supervise", SUPERVISE), ("long_documents", LONG_DOCUMENTS), ("malformed", MALFORMED)):
            value = getattr(self, key)
            check(value in allowed, f"data.{key} is {value!r}; it must be one of {', '.join(allowed)}")
        check_template_kwargs(self.template_kwargs or {}, "data.template_kwargs")
        if self.date is not None:
            as_date(self.date)
        check(not (self.mix and self.path), f"data.path is {self.path}; with data.mix it must be null")
        usual = SourceConfig()
        for key in ("format", "columns", "roles", "assistant_pattern", "name", "split"):
            value = getattr(self, key)
            if key == "columns":  # presets name them as the format does
                value = {name: column for name, column in value.items() if column not in (name, None)}
            used = not self.mix or self.heldout or value == getattr(usual, key)
            check(used, f"data.{key} is {value!r}; with data.mix each data set has its own, data.mix.NAME.{key}")
        for name, source in self.sources.items():
            source.check(f"data.mix.{name}" if self.mix else "data")
        check(self.row_tokens >= MIN_TOKENS, f"data.row_tokens is {self.row_tokens}; it must be at least {MIN_TOKENS}")
        for key, least in (("shuffle_window", 0), ("workers", 0), ("prefetch", 1)):
            check(getattr(self, key) >= least, f"data.{key} is {getattr(self, key)}; it must be {least} or more")
        paths = [source.path for source in self.sources.values()]
        check(self.heldout not in paths, f"data.heldout is data.path ({self.heldout}); it must be other data, or null")

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The data sets to draw from, by name; the only one's name is empty."""
        return self.mix or {"": self}


class Source(Protocol):
    """One epoch of rows, never whole in memory."""

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        """Rows from number `start` on, in the data's order. Raises UserError where one cannot be read."""

    def identity(self) -> str:
        """Changes when the data do, as far as that shows without reading them."""


def check_found(config: DataConfig) -> None:
    """Raise UserError for files that are not there, or of no known kind. Hubs are not asked."""
    for name, source in config.sources.items():
        files_of(source.path, field_of(name, "path"))
    if config.heldout is not None:
        files_of(config.heldout, field_of("", "heldout"))


def are_here(config: DataConfig) -> bool:
    """Whether all data are files on this machine. Raises UserError for files of no known kind."""
    named = {source.path: field_of(name, "path") for name, source in config.sources.items()}
    named |= {} if config.heldout is None else {config.heldout: field_of("", "heldout")}
    return all(
        (Path(path).is_file() or glob.glob(path, recursive=True)) and files_of(path, f) for path, f in named.items()
    )


def open_source(config: SourceConfig, key: str = "path", name: str = "") -> Source:
    """The data at config.path, or at another path of the config (`key`: heldout). `name`: the data set's in a mixture.

    Raises UserError if they are missing, of no known kind, empty, or if their first row cannot be read.
    """
    path, field = getattr(config, key), field_of(name, key)
    files = files_of(path, field)
    if not files:
        source: Source = Hub(path, config.name, config.split, field)
    else:
        source = Parquet(files) if files[0].endswith(".parquet") else JsonLines(files)
    first = next(source.rows(), None)
    check(first is not None, f"{field} is {path}; it has no rows")
    parse(*first)
    return source


def field_of(name: str, key: str) -> str:
    return f"data.mix.{name}.{key}" if name else f"data.{key}"


def files_of(path: str, field: str) -> list[str]:
    """A path's files, all JSONL or all Parquet; none where it may be a hub's data set. Raises UserError."""
    files = [path] if Path(path).is_file() else sorted(glob.glob(path, recursive=True))
    files = [file for file in files if Path(file).is_file()]
    alike = any(all(file.endswith(kind) for file in files) for kind in (JSONL_SUFFIXES, ".parquet"))
    check(alike, f"{field} is {path}; files must be all JSONL ({', '.join(JSONL_SUFFIXES)}) or all .parquet")
    check(files or is_hub_name(path) or Path(path).is_dir(), f"{field} is {path}; there is no such file")
    return files


def is_hub_name(path: str) -> bool:
    """Whether a path that is no file can be the name of a hub data set: NAME or OWNER/NAME."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) is not None and not path.endswith(FILE_SUFFIXES)


def files_identity(files: list[str]) -> str:
    """A digest of the files' names and sizes."""
    listing = [[file, Path(file).stat().st_size] for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


class JsonLines:
    """JSON objects, one a line, of plain or gzip files; blank lines are no rows.

    Lines cannot be counted without being read, so it notes on its way where some of them lie; `marks` has the first
    such row of every MARK_ROWS. In a gzip file no place but its start can be gone to.
    """

    def __init__(self, files: list[str]):
        self.files = files
        self.marks: dict[int, Mark] = {}

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        mark = self.mark(start)
        return islice(self.lines(mark), start - mark[0], None)

    def mark(self, row: int) -> Mark:
        """The last mark that is not behind row number `row`."""
        known = (self.marks.get(place) for place in range(row // MARK_ROWS, -1, -1))
        return next((mark for mark in known if mark and mark[0] <= row), (0, 0, 0, 0))

    def remember(self, mark: Mark) -> None:
        """A mark that this source gave for the same files."""
        self.marks.setdefault(mark[0] // MARK_ROWS, mark)

    def lines(self, mark: Mark) -> Iterator[tuple[str, bytes]]:
        row, first, offset, before = mark
        for number, file in enumerate(self.files[first:], first):
            self.remember((row, number, offset, before))
            for line in lines_of(file, offset):
                if line.strip():
                    if not file.endswith(".gz"):
                        self.remember((row, number, offset, before))
                    yield f"{file}:{before + 1}", line
                    row += 1
                offset, before = offset + len(line), before + 1
            offset = before = 0


def lines_of(file: str, offset: int = 0) -> Iterator[bytes]:
    """A file's lines, from a byte on that begins one. Raises UserError for a file that cannot be read, and for a .gz
    that is none or is cut short."""
    try:
        with (gzip.open if file.endswith(".gz") else open)(file, "rb") as lines:
            lines.seek(offset)
            yield from lines
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{file}: not gzip, or not all of it: {one_line(error)}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error


def behind_place(place: str, error: UserError) -> str:
    """What is wrong with a row, behind its place, which the error may tell itself."""
    return str(error) if str(error).startswith(place) else f"{place}: {error}"


def parse(place: str, row: Row | bytes | ArrowRow) -> Row:
    """A row as a dict. Raises UserError for a line of JSONL that is not one JSON object."""
    if isinstance(row, dict):
        return row
    if isinstance(row, ArrowRow):
        return row.read()
    hint = "; of an array jq -c '.[]' makes a line of each object" if row.lstrip().startswith(b"[") else ""
    try:
        value = json.loads(row)
    except ValueError as error:
        raise UserError(f"{place}: not JSON: {one_line(error)}{hint}") from error
    check(isinstance(value, dict), f"{place}: a row must be a JSON object, not {type(value).__name__}{hint}")
    return value


class Parquet:
    """Rows of Parquet files, a batch of a row group at a time. Raises UserError for one that is none or is damaged."""

    def __init__(self, files: list[str]):
        self.files = files

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        for file in self.files:
            with open_parquet(file) as table:
                yield from rows_of(table, file, start)
                start = max(0, start - table.metadata.num_rows)


def open_parquet(file: str) -> Any:
    # Loaded where needed: most data is JSONL, and every command pays for imports.
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except ValueError as error:
        raise UserError(f"{file}: not Parquet: {one_line(error)}") from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error


def rows_of(table: Any, file: str, start: int) -> Iterator[PlacedRow]:
    """Rows of an open Parquet file from number `start` on; row groups before it are not read."""
    first = 0
    for group in range(table.num_row_groups):
        size = table.metadata.row_group(group).num_rows
        if first + size > start:
            rows = enumerate(group_rows(table, group, file), first)
            yield from ((f"{file}: row {number + 1}", row) for number, row in rows if number >= start)
        first += size


def group_rows(table: Any, group: int, file: str) -> Iterator[ArrowRow]:
    try:
        for batch in table.iter_batches(BATCH_ROWS, row_groups=[group]):
            yield from (ArrowRow(batch, number) for number in range(batch.num_rows))
    except (OSError, ValueError) as error:  # behind a footer that is whole
        raise UserError(f"{file}: row group {group + 1} is damaged: {one_line(error)}") from error


class Hub:
    """A hub data set, or a directory laid out like one, through `datasets`. Raises UserError where it does not load, or
    not all of it."""

    def __init__(self, path: str, name: str | None, split: str, field: str):
        # Loaded where needed: it takes a second.
        import datasets

        self.place = f"{path} ({f'{name}, ' if name else ''}{split})"
        try:
            self.dataset = datasets.load_dataset(path, name, split=split, streaming=True)
        except (OSError, ValueError) as error:
            raise UserError(f"{field} is {path}; it is no file, and no data set: {one_line(error)}") from error

    def identity(self) -> str:
        info = self.dataset.info  # told by the hub, as far as it knows
        return f"{self.place} {info.version} {info.dataset_size}"

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        try:
            for number, row in enumerate(self.read(self.dataset.skip(start)), start + 1):
                yield f"{self.place}: row {number}", row
        except (OSError, ValueError) as error:  # of another shard, of other columns
            raise UserError(f"{self.place}: cannot be read to its end: {one_line(error)}") from error

    def read(self, dataset: Any) -> Iterator[Row | ArrowRow]:
        """Rows of a datasets.IterableDataset; Python's own where types are not known (CSV), for they may change."""
        features = dataset.features  # a copy each time
        if features is None:
            yield from dataset
            return
        for table in dataset.with_format("arrow").iter(BATCH_ROWS):
            for batch in table.to_batches():
                yield from (ArrowRow(batch, number, features.decode_example) for number in range(batch.num_rows))
