"""Which data a run reads: the config that says it, and who reads files, directories and hub data sets of that kind.

Knows nothing of tokens: a row is handed on with its place (file and line, or row number) for error messages.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from eagle_train.corpus.arrow_files import Arrow, Hub, Parquet, check_directory, is_saved, saved_files
from eagle_train.corpus.chat import ROLES, SUPERVISE
from eagle_train.corpus.columns import BESIDE, FORMATS
from eagle_train.corpus.json_files import JsonFiles
from eagle_train.corpus.kinds import FILE_SUFFIXES, KINDS, advice, check_contents, kind_of
from eagle_train.corpus.rows import PlacedRow, parse
from eagle_train.corpus.template import as_date, check_template_kwargs
from eagle_train.errors import UserError, check, one_line

READERS = {"JSON": JsonFiles, "Parquet": Parquet, "Arrow": Arrow}
LONG_DOCUMENTS = ("split", "drop")
MALFORMED = ("refuse", "skip")
MIN_TOKENS = 3  # a shorter document has no supervised slot (DESIGN section 3.1)


@dataclass
class SourceConfig:
    """One data set of `data.mix`, and what `data` itself says of its only one.

    `path`: a JSON file (an object a line, or an array), a Parquet or an Arrow file, a glob of one of these kinds, a
    directory that `datasets` saved to disk, or a hub data set (or its local directory). `name`: a hub data set's
    config; `split`: its split, or that of a directory. Relative paths are relative to the working directory. `columns`:
    the format's keys (`columns.FORMATS`, `columns.BESIDE`) to the row's columns, None for one that is not to be read.
    `roles`: who else speaks than `chat.ROLES` knows, whatever the case, and as what. `assistant_pattern`: a regular
    expression that says what of a text the assistant wrote, its first group if it has one. `weight`: how often its
    documents are drawn beside the others'.
    """

    path: str | None = None  # JSON, Parquet or Arrow: a file, glob or directory; or a hub data set
    format: str = "messages"  # messages | sharegpt | prompt_response | text
    columns: dict[str, str | None] = field(default_factory=dict)  # the format's keys: the data's names of them
    roles: dict[str, str] | None = None  # who else speaks, and as what: {narrator: user}, say
    assistant_pattern: str | None = None  # of format=text: a regular expression, its group 1 or all of it
    name: str | None = None  # config of a hub data set
    split: str = "train"  # of a hub data set, or of a directory that `save_to_disk` wrote
    weight: float = 1.0  # of a data set in a mix

    def check(self, key: str) -> None:
        """Raise UserError, naming the field below `key`, for values that cannot be."""
        known = FORMATS.get(self.format)
        check(known is not None, f"{key}.format is {self.format!r}; it must be one of {', '.join(FORMATS)}")
        beside = BESIDE[self.format]
        known = (*known, *beside)
        for column, name in self.columns.items():
            wanted = f"{key}.format={self.format} reads {', '.join(known)}"
            check(column in known, f"{key}.columns.{column} is unknown; {wanted}")
            check(bool(name) or column in beside, f"{key}.columns.{column} is {name!r}; it must name a column")
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

    mix: dict[str, SourceConfig] | None = None  # instead of path: data sets by name, each with its path
    heldout: str | None = None  # other data for the held-out measurements, or null
    supervise: str = "assistant"  # assistant | last | all: whose tokens are learnt; last: the assistant's last turn
    template_kwargs: dict[str, Any] | None = None  # the chat template's own variables, {enable_thinking: false}, say
    date: str | None = None  # the day for a template that reads the clock, 2026-07-31, say; null: when the run began
    row_tokens: int = 2048  # length of a packed row
    long_documents: str = "split"  # split | drop: documents longer than a row; both are counted
    malformed: str = "refuse"  # refuse | skip: what a malformed row does to the run; skipped rows are counted
    shuffle_window: int = 4096  # documents shuffled among themselves; 0 keeps the data's order
    seed: int = 0
    workers: int = 0  # processes of each rank that tokenise; 0: its own does
    prefetch: int = 2  # optimiser steps drawn ahead

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
        files_of(source, "path", field_of(name, "path"))
    if config.heldout is not None:
        files_of(config, "heldout", field_of("", "heldout"))


def are_here(config: DataConfig) -> bool:
    """Whether all data are files on this machine. Raises UserError for files of no known kind."""
    named = [(source, "path", field_of(name, "path")) for name, source in config.sources.items()]
    named += [] if config.heldout is None else [(config, "heldout", field_of("", "heldout"))]
    paths = [getattr(source, key) for source, key, _ in named]
    there = all(os.path.exists(path) or glob.glob(path, recursive=True) for path in paths)
    return there and all(files_of(*each) for each in named)


def open_source(config: SourceConfig, key: str = "path", name: str = "") -> Source:
    """The data at config.path, or at another path of the config (`key`: heldout). `name`: the data set's in a mixture.

    Raises UserError if they are missing, of no known kind, empty, or if their first row cannot be read.
    """
    path, field = getattr(config, key), field_of(name, key)
    files = files_of(config, key, field)
    source: Source = READERS[kind_of(files[0])](files) if files else Hub(path, config.name, config.split, field)
    first = next(source.rows(), None)
    check(first is not None, f"{field} is {path}; it has no rows")
    parse(*first)
    return source


def field_of(name: str, key: str) -> str:
    return f"data.mix.{name}.{key}" if name else f"data.{key}"


def files_of(config: SourceConfig, key: str, field: str) -> list[str]:
    """A path's files, all of one kind; none where it may be a hub's data set. Raises UserError."""
    path = getattr(config, key)
    if is_saved(path):
        return saved_files(path, config.split, field)
    # os.path's own questions are answered with no where nobody may look.
    found = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    for file in found:
        check_place(file, f"{field} is {path}")
    files = [file for file in found if os.path.isfile(file)]
    if "**" in path:  # which may come to a file in a circle of links
        files = list({os.path.realpath(file): file for file in reversed(files)}.values())[::-1]
    check_kinds(files, f"{field} is {path}")
    is_directory = os.path.isdir(path)
    check(files or is_directory or is_hub_name(path), f"{field} is {path}; there is no such file{hint(path)}")
    if is_directory and not files:
        check_directory(Path(path), field)
    for file in files:
        check_contents(file)
    return files


def check_place(file: str, where: str) -> None:
    """Raise UserError for a link to nothing, and for what can be read but once."""
    is_lost = os.path.islink(file) and not os.path.exists(file)
    check(not is_lost, f"{where}; {file} is a link to a file that is not there")
    is_once = os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file)
    check(not is_once, f"{where}; {file} is a pipe or a device, and data are read more than once: write them to a file")


def check_kinds(files: list[str], where: str) -> None:
    """Raise UserError unless all files are of one kind that is read."""
    known = [f"{kind} ({', '.join(suffixes)})" for kind, suffixes in KINDS.items()]
    wanted = f"files must be all {', or all '.join(known)}"
    for file in files:
        told = advice(file)
        check(kind_of(file) is not None, f"{where}; {file} is {told}" if told else f"{where}; {wanted}, not {file}")
    kinds = Counter(map(kind_of, files))
    found = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    check(len(kinds) < 2, f"{where}; there are {found}: {wanted}")


def hint(path: str) -> str:
    """What to do about a path that is not there, where that can be told."""
    if path.startswith("outputs/stdlib_chat/"):  # the bundled data
        return "; python data/stdlib_chat.py outputs/stdlib_chat makes it, in a clone of the repository"
    if "://" in path:
        return "; what has an address must be fetched first, unless it is a hub data set: OWNER/NAME"
    return "; give $HOME in the place of ~" if path.startswith("~") else ""


def is_hub_name(path: str) -> bool:
    """Whether a path that is no file can be the name of a hub data set: NAME or OWNER/NAME."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) is not None and not path.endswith(FILE_SUFFIXES)
