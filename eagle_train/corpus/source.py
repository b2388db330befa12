"""The data that a run reads: its config, and opening files, directories and hub data sets.

Knows nothing of tokens: rows are passed on with their place (file and line, or row number) for error messages.
"""

import glob
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from eagle_train.corpus.arrow_files import Arrow, Hub, Parquet, check_directory, commit_of, is_saved, saved_files
from eagle_train.corpus.columns import BESIDE, FORMATS
from eagle_train.corpus.conversations import ROLES, SUPERVISE
from eagle_train.corpus.file_formats import FILE_SUFFIXES, KINDS, PLAIN, advice, check_contents, kind_of
from eagle_train.corpus.json_files import JsonFiles
from eagle_train.corpus.plain_files import PlainFiles
from eagle_train.corpus.rows import PlacedRow
from eagle_train.corpus.template import as_date, check_template_kwargs
from eagle_train.distributed import ALONE, World
from eagle_train.errors import UserError, check, one_line
from eagle_train.settings import BUNDLED

_LOG = logging.getLogger(__name__)
_LONG_DOCUMENTS = ("split", "drop")
_MALFORMED = ("refuse", "skip")
MIN_TOKENS = 3  # a shorter document has no supervised slot (DESIGN section 3.1)


@dataclass
class SourceConfig:
    """One data set: an entry of `data.mix`, or `data` itself without a mix.

    `path`: a JSON file (an object a line, or an array), a Parquet or an Arrow file, for `format: text` a file of plain
    text, a glob of files of one kind, a directory that `datasets` saved to disk, or a hub data set (or its local
    directory). Relative paths are relative to
    the working directory. `name`: a hub data set's config; `split`: its split, or that of a directory; `revision`: its
    branch, tag or commit, see `pin`. `columns`: the
    format's keys (`columns.FORMATS`, `columns.BESIDE`) to the row's columns, None to ignore one. `roles`: roles of
    speakers that `conversations.ROLES` lacks, in any case. `assistant_pattern`: a regular expression for the parts of a
    text that the assistant wrote, its first group if it has one. `weight`: the relative frequency of its rows.
    """

    path: str | None = None  # JSON, Parquet, Arrow, plain (data=text): a file, glob or directory; or a hub data set
    format: str = "messages"  # messages | sharegpt | prompt_response | text
    columns: dict[str, str | None] = field(default_factory=dict)  # the format's keys: the data's names of them
    roles: dict[str, str] | None = None  # who else speaks, and as what: {narrator: user}, say
    assistant_pattern: str | None = None  # of format=text: a regular expression, its group 1 or all of it
    name: str | None = None  # config of a hub data set
    split: str = "train"  # of a hub data set, or of a directory that `save_to_disk` wrote
    revision: str | None = None  # of a hub data set: a commit, tag or branch; null: the newest when the run began
    weight: float = 1.0  # of a data set in a mix

    def check(self, key: str) -> None:
        """Raise UserError, which names the field below `key`, for invalid values."""
        check(self.format in FORMATS, f"{key}.format is {self.format!r}; it must be one of {', '.join(FORMATS)}")
        beside = BESIDE[self.format]
        known = (*FORMATS[self.format], *beside)
        for column, name in self.columns.items():
            wanted = f"{key}.format={self.format} reads {', '.join(known)}"
            check(column in known, f"{key}.columns.{column} is unknown; {wanted}")
            check(bool(name) or column in beside, f"{key}.columns.{column} is {name!r}; it must name a column")
        for speaker, role in (self.roles or {}).items():
            check(bool(role), f"{key}.roles.{speaker} is {role!r}; it must be a role, for example user or assistant")
            check(self.format != "text", f"{key}.roles.{speaker} is {role!r}; {key}.format=text has no speakers")
        self._check_pattern(key)
        check(bool(self.path), f"{key}.path is missing; give a file, a glob or a hub data set")
        check(self.weight > 0, f"{key}.weight is {self.weight}; it must be above 0")

    def _check_pattern(self, key: str) -> None:
        if self.assistant_pattern is None:
            return
        field = f"{key}.assistant_pattern is {self.assistant_pattern!r}"
        check(self.format == "text", f"{field}; it is for {key}.format=text, not {self.format}")
        try:
            re.compile(self.assistant_pattern)
        except re.error as error:
            raise UserError(f"{field}; it is no regular expression: {one_line(error)}") from error

    @property
    def takes_plain(self) -> bool:
        """Whether a file of no other kind is read as one text."""
        return self.format == "text"

    @property
    def speakers(self) -> dict[str, str]:
        """Roles by speaker, in lower case."""
        return ROLES | {speaker.lower(): role for speaker, role in (self.roles or {}).items()}


@dataclass
class DataConfig(SourceConfig):
    """The group `data`. Raises UserError for invalid values.

    `mix`: data sets by name, drawn by weight, instead of the one at `path`; each repeats when it is exhausted.
    `heldout`: a path as `path`, of the same format, or None. `row_tokens`: length of a packed row; a longer document
    is split or dropped (`long_documents`). `malformed`: whether a malformed row ends the run, or is skipped and
    counted. `shuffle_window`: how many rows are shuffled together; 0 keeps the data's order. `supervise`: what counts
    as produced in a conversation (all of the assistant's turns, its last, or every token); where there are texts alone
    it is refused, for all of a text counts, unless there is a pattern. `template_kwargs`: the chat template's own
    variables. `date`: the date that a template gets when
    it reads the clock; None: today, and in a resumed run the day when it began. `workers`: tokenising processes of each
    rank, 0: the rank itself. `prefetch`: optimiser steps that are drawn ahead.
    """

    mix: dict[str, SourceConfig] | None = None  # instead of path: data sets by name, each with its path
    heldout: str | None = None  # other data for the held-out measurements, or null
    heldout_revision: str | None = None  # of heldout, if it is a hub data set, as revision
    supervise: str = "assistant"  # assistant | last | all: whose tokens are learnt; last: the assistant's last turn
    template_kwargs: dict[str, Any] | None = None  # the chat template's own variables, {enable_thinking: false}, say
    date: str | None = None  # the day for a template that reads the clock, 2026-07-31, say; null: when the run began
    row_tokens: int = 2048  # length of a packed row
    long_documents: str = "split"  # split | drop: documents longer than a row; both are counted
    malformed: str = "refuse"  # refuse | skip: what a malformed row does to the run; skipped rows are counted
    shuffle_window: int = 4096  # rows of the data shuffled among themselves; 0 keeps the data's order
    seed: int = 0  # of the order of rows
    workers: int = 0  # processes of each rank that tokenise; 0: its own does
    prefetch: int = 2  # optimiser steps drawn ahead

    def __post_init__(self) -> None:
        for key, allowed in (("supervise", SUPERVISE), ("long_documents", _LONG_DOCUMENTS), ("malformed", _MALFORMED)):
            value = getattr(self, key)
            check(value in allowed, f"data.{key} is {value!r}; it must be one of {', '.join(allowed)}")
        check_template_kwargs(self.template_kwargs or {}, "data.template_kwargs")
        if self.date is not None:
            as_date(self.date)
        check(not (self.mix and self.path), f"data.path is {self.path}; with data.mix it must be null")
        usual = SourceConfig()
        for key in ("format", "columns", "roles", "assistant_pattern", "name", "split", "revision"):
            value = getattr(self, key)
            if key == "columns":  # presets name them as the format does
                value = {name: column for name, column in value.items() if column not in (name, None)}
            used = not self.mix or (bool(self.heldout) and key != "revision") or value == getattr(usual, key)
            check(used, f"data.{key} is {value!r}; with data.mix each data set has its own, data.mix.NAME.{key}")
        has_turns = any(source.format != "text" for source in self.sources.values())
        check(
            has_turns or self.supervise == DataConfig.supervise,
            f"data.supervise is {self.supervise!r}; it is for conversations, and format=text has none: leave it at "
            f"{DataConfig.supervise}, and give assistant_pattern for a part of a text",
        )
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


# What packs, orders and marks rows for training, and what is measured beside it.
FOR_TRAINING = (
    "heldout",
    "heldout_revision",
    "supervise",
    "row_tokens",
    "long_documents",
    "shuffle_window",
    "seed",
    "workers",
    "prefetch",
)


def check_prompts(data: DataConfig) -> None:
    """Raise UserError for data whose prompts alone are read, one by one: of a mix, of plain text, or with a key that is
    not the default's and would change nothing."""
    check(not data.mix, "data.mix: one data set is read at a time; give data.path")
    check(data.format != "text", "data.format=text: it has no prompts; give conversations")
    for key in (*FOR_TRAINING, "weight"):
        value = getattr(data, key)
        check(value == getattr(DataConfig, key), f"data.{key}={value}: is not read here; leave it out")


def check_variables(of_target: Mapping[str, Any] | None, data: DataConfig) -> None:
    """Raise UserError for variables of the chat template in `target.template_kwargs` (`of_target`), which are for
    prompts alone, where rows of `data` are rendered: with its own, and these would change nothing."""
    check(
        not of_target or of_target == data.template_kwargs,
        f"target.template_kwargs={of_target}: is for commands that read no data; give data.template_kwargs",
    )


def idle_keys(data: DataConfig) -> Iterator[tuple[str, Any, str]]:
    """Keys whose values change nothing of how these data are read and drawn: each key, its value and the reason."""
    for name, source in data.sources.items():
        paths = [source.path, data.heldout if source is data else None]
        if all(_is_of_files(path) for path in paths if path):
            for key in ("name", "split", "revision"):
                if (value := getattr(source, key)) != getattr(SourceConfig, key):
                    yield field_of(name, key), value, "files have no configs, splits or revisions"
    if not data.mix and data.weight != SourceConfig.weight:
        yield "data.weight", data.weight, "it is of a data set in data.mix"
    if not data.mix and data.seed != DataConfig.seed and not data.shuffle_window:
        yield "data.seed", data.seed, "data.shuffle_window=0 keeps the data's order"


class Source(Protocol):
    """One epoch of rows, which is never in memory as a whole."""

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        """Rows from number `start` on, in the data's order, with their places.

        Yields malformed rows unparsed; `rows.parse` raises for them where they are used. Raises UserError only for a
        file that cannot be read further.
        """

    def identity(self) -> str:
        """A string that changes with the data, as far as this shows without reading them."""


@runtime_checkable
class Marked(Protocol):
    """A `Source` of which a resumed run reads no more than what is behind a mark; of others it reads all before."""

    def mark(self, row: int) -> Any:
        """The last known place at or before row number `row`, as a tuple of numbers, for a checkpoint."""

    def remember(self, mark: Any) -> None:
        """Keep a mark that `mark` returned earlier for the same data, for `rows` to begin at."""


_READERS: dict[str, Callable[[list[str]], Source]] = {
    "JSON": JsonFiles,
    "Parquet": Parquet,
    "Arrow": Arrow,
    PLAIN: PlainFiles,
}


def check_found(config: DataConfig) -> None:
    """Raise UserError for missing files and unknown formats. The hub is not asked."""
    for name, source in config.sources.items():
        _files_of(source, "path", field_of(name, "path"))
    if config.heldout is not None:
        _files_of(config, "heldout", field_of("", "heldout"))


def absent(config: DataConfig, instead: str | None) -> dict[str, str]:
    """The data that are not on this machine: what to say of each, by its field. The hub is not asked.

    `instead`: what to do about a file that is missing, where it must be here; None where it may lie elsewhere. Raises
    UserError for such a file, and for unknown formats of those that are here.
    """
    named = [(field_of(name, "path"), source, "path") for name, source in config.sources.items()]
    named += [] if config.heldout is None else [(field_of("", "heldout"), config, "heldout")]
    told = {}
    for key, source, kind in named:
        path = getattr(source, kind)
        if os.path.exists(path) or glob.glob(path, recursive=True):
            _files_of(source, kind, key)
            continue
        may_lack = instead is None or _is_hub_name(path)
        check(may_lack, f"{key} is {path}; there is no such file{_remedy(path, kind)}; {instead}")
        told[key] = f"{key} is {path}; it is not here{_remedy(path, kind)}"
    return told


_REVISIONS = {"path": "revision", "heldout": "heldout_revision"}


def pin(config: DataConfig, known: Callable[[str], Any] | None = None, world: World = ALONE) -> dict[str, str | None]:
    """Let every data set of the hub be read at one commit, the same on all ranks; returns the commits, by the keys of
    the config that they are set to.

    That of the revision that is given; else, of a run that goes on with the same data set, what it began with, None
    where that was not said; else the newest. `known` says what such a run began with, by the key of a path or a
    revision. With HF_HUB_OFFLINE the hub is not asked, and nothing changes. All ranks call it. Raises UserError where
    the hub does not know the data set or the revision.
    """
    named = [(name, source, "path") for name, source in config.sources.items()]
    named += [] if config.heldout is None else [("", config, "heldout")]
    holders = {field_of(name, _REVISIONS[key]): (source, key, field_of(name, key)) for name, source, key in named}

    def ask() -> dict[str, str | None]:
        commits = {}
        for at, (source, key, named_by) in holders.items():
            path, given = getattr(source, key), getattr(source, _REVISIONS[key])
            if os.path.isdir(path) or _files_of(source, key, named_by):
                continue
            if known is not None and not given and known(named_by) == path:
                commits[at] = known(at)
            else:
                commits[at] = commit_of(path, given, named_by)
        return commits

    commits = world.by_main(ask)
    for at, commit in commits.items():
        source, key, _ = holders[at]
        setattr(source, _REVISIONS[key], commit)
    return commits


def open_source(config: SourceConfig, key: str = "path", name: str = "", field: str | None = None) -> Source:
    """The data at config.path, or at another path of the config (`key`: heldout). `name`: the data set's in a mix.
    `field`: what errors call the path; None: by both.

    Raises UserError if they are missing, of an unknown format or empty. The first row may be malformed.
    """
    path, field = getattr(config, key), field or field_of(name, key)
    files = _files_of(config, key, field)
    revision = getattr(config, _REVISIONS[key])
    source = _reader_of(files, config) if files else Hub(path, config.name, config.split, field, revision)
    check(next(source.rows(), None) is not None, f"{field} is {path}; it has no rows")
    return source


def _reader_of(files: list[str], config: SourceConfig) -> Source:
    kind = kind_of(files[0], config.takes_plain)
    assert kind is not None, files[0]  # `_files_of` refuses other formats
    return _READERS[kind](files)


def field_of(name: str, key: str) -> str:
    return f"data.mix.{name}.{key}" if name else f"data.{key}"


def _files_of(config: SourceConfig, key: str, field: str) -> list[str]:
    """A path's files, all of one format; none if the path may name a hub data set. Raises UserError."""
    path = getattr(config, key)
    if is_saved(path):
        return saved_files(path, config.split, field)
    # os.path answers no for paths without permission.
    found = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    for file in found:
        _check_place(file, f"{field} is {path}")
    files = [file for file in found if os.path.isfile(file)]
    if "**" in path:  # it may find a file several times through links
        files = list({os.path.realpath(file): file for file in reversed(files)}.values())[::-1]
    _check_kinds(files, f"{field} is {path}", config.takes_plain)
    is_directory = os.path.isdir(path)
    missing = f"{field} is {path}; there is no such file{_remedy(path, key)}"
    check(bool(files) or is_directory or _is_hub_name(path), missing)
    if is_directory and not files:
        check_directory(Path(path), field)
    for file in files:
        check_contents(file, config.takes_plain)
    return files


def _check_place(file: str, where: str) -> None:
    """Raise UserError for a broken link, and for a file that can be read only once."""
    is_lost = os.path.islink(file) and not os.path.exists(file)
    check(not is_lost, f"{where}; {file} is a link to a file that is not there")
    is_once = os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file)
    check(not is_once, f"{where}; {file} is a pipe or a device, and data are read more than once: save them to a file")


def _check_kinds(files: list[str], where: str, takes_plain: bool) -> None:
    """Raise UserError unless all files have one supported format. `takes_plain`: see `kind_of`."""
    known = [f"{kind} ({', '.join(suffixes)})" for kind, suffixes in KINDS.items()] + [PLAIN] * takes_plain
    wanted = f"files must be all {', or all '.join(known)}"
    for file in files:
        what, kind = advice(file), kind_of(file, takes_plain)
        check(kind is not None, f"{where}; {file} is {what}" if what else f"{where}; {wanted}, not {file}")
    kinds = Counter(kind_of(file, takes_plain) for file in files)
    found = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    check(len(kinds) < 2, f"{where}; there are {found}: {wanted}")


def _remedy(path: str, key: str) -> str:
    return hint(path) + ("; data.heldout=null leaves it out" if key == "heldout" else "")


def _is_of_files(path: str) -> bool:
    """Whether a path names files, and neither a directory nor a data set of the hub."""
    return not os.path.isdir(path) and (os.path.isfile(path) or bool(glob.glob(path, recursive=True)))


BUNDLED_DATA = "outputs/stdlib_chat/"


def hint(path: str) -> str:
    """What to do about a missing path, where that is known; else empty."""
    if path.startswith(BUNDLED_DATA):
        return "; python data/stdlib_chat.py outputs/stdlib_chat makes it, in a clone of the repository"
    if "://" in path:
        return "; download the file first, or give the name of a hub data set: OWNER/NAME"
    return "; write $HOME instead of ~" if path.startswith("~") else ""


def tell_bundled(path: str, target: str, key: str = "questions") -> None:
    """Log a line where another target is asked what the bundled one was trained for."""
    if path.startswith(BUNDLED_DATA) and BUNDLED not in target:
        _LOG.info("note: %s=%s: questions for the bundled target; give %s=FILE with your own", key, path, key)


def _is_hub_name(path: str) -> bool:
    """Whether a missing path can name a hub data set: NAME or OWNER/NAME."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", path) is not None and not path.endswith(FILE_SUFFIXES)
