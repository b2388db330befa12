"""Suites: public sets of questions by name (conf/suite), read from a file or from the hub, with what is usual of each.

None comes with the project. Knows nothing of targets or tokens. DESIGN section 3.8.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from eagle_train.corpus.arrow_files import Hub, is_dictionary, saved_splits
from eagle_train.corpus.rows import PlacedRow, Row, parse
from eagle_train.corpus.source import SourceConfig, open_source
from eagle_train.errors import OptionError, UserError, check, shown
from eagle_train.settings import CONF_DIR, build
from evals.bench.questions import Question, evenly, line_of, question_of

_LOG = logging.getLogger(__name__)
THINKING = "enable_thinking"  # the variable of chat templates that Qwen3, GLM and others read
PROMPT = "{prompt}"
OWN = "own"  # the suite of any file
NO_SUITE = f"needs suite=NAME, suite={OWN} say"


@dataclass(kw_only=True)
class HubData:
    """Where a suite lies in the hub. `columns`: fields of a row to the columns that have them there."""

    path: str | None = None
    name: str | None = None
    split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class Suite:
    """A set of questions. Raises OptionError for values that cannot be.

    `title`: its name; None: no suite was chosen. `path`: a file or directory; None: it is read from `hub`. `columns`:
    fields of a row (`question_id`, `turns`, `prompt`, `question`, `answer`, `messages`) to the file's columns. `size`:
    how many questions were published; None: any number. `category`: the column of categories, if another than
    `category`. `fields`: what each row must have. `categories`: all there are; None: any. `template`: the text around a
    first turn, which stands for {prompt}. `thinking`: given to the chat template as `enable_thinking`; None: it is not
    given. `licence`, `source`: for reports and errors; `source` ends with the file's name.
    """

    title: str | None = None
    path: str | None = None
    hub: HubData = field(default_factory=HubData)
    columns: dict[str, str] = field(default_factory=dict)
    size: int | None = None
    category: str | None = None
    fields: list[str] = field(default_factory=list)
    categories: list[str] | None = None
    template: str | None = None
    thinking: bool | None = None
    licence: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if self.title is None:
            given = [f"{key}={shown(value)}" for key, value in asdict(self).items() if key in KEYS and value]
            said = f"{given[0] if given else 'thinking'}: {NO_SUITE}"
            check(not given and self.thinking is None, said, OptionError)
        wrong = f"template={shown(self.template)}: must hold {PROMPT}, where the question stands"
        check(self.template is None or PROMPT in self.template, wrong, OptionError)

    @property
    def place(self) -> str:
        """Where it is read: the path, or the hub's name."""
        return str(self.path or self.hub.path)

    def read(self, limit: int | None = None, key: str = "suite", give: str = "suite.path=FILE") -> list[Question]:
        """Its questions, or `limit` of them, taken evenly.

        `key`: the config's, and `give`: what names a file, for errors. Raises UserError for what is missing, and with
        its place for a row of another schema or an unknown category.
        """
        rows = list(self._rows(key, give))
        self._check_size(len(rows), key)
        lines = [line_of(place) for place, _ in rows]
        if len(set(lines)) < len(lines):  # of several files, each of which begins at 1
            lines = list(range(1, len(lines) + 1))
        placed = zip(rows, lines, strict=True)
        return evenly([self._question(place, parse(place, row), line, key) for (place, row), line in placed], limit)

    def about(self) -> dict[str, Any]:
        """For results.json."""
        keys = ("title", "template", "thinking", "licence", "source")
        return {"place": self.place, "size": self.size, **{key: getattr(self, key) for key in keys}}

    def _rows(self, key: str, give: str) -> Iterator[PlacedRow]:
        told = f", from {self.source}" if self.source else ""
        if self.path is not None:
            check(Path(self.path).exists(), f"{key}.path={self.path}: no such file; give {self.title}'s{told}")
            return open_source(self._source(self.path, f"{key}.path={self.path}"), field=f"{key}.path").rows()
        hub, give = self.hub, f"give {give}{told}"
        check(hub.path is not None, f"{key}.path is needed: {self.title} is not read from the hub; {give}")
        try:
            return Hub(str(hub.path), hub.name, hub.split, f"{key}.hub.path").rows()
        except UserError as error:
            raise UserError(f"{error}; {give}") from error

    def _source(self, path: str, where: str) -> SourceConfig:
        """What is read of a path: of a directory the suite's own file as it is published, else the config and the split
        that it has in the hub. Raises UserError for what is plainly another split."""
        split, of = self.hub.split, f"{self.title}'s questions are of the split {self.hub.split}"
        words, kept = re.split("[^a-z]+", Path(path).name.lower()), saved_splits(path)
        by_name = TRAIN in words and (kept == [None] or Path(path).is_file())
        is_training = kept == [TRAIN] or by_name
        allowed = self.size is None or split == TRAIN or not is_training
        check(allowed, f"{where}: is the training split; {of}")
        if not Path(path).is_dir():
            return SourceConfig(path=path)
        if kept is not None:
            several, one = is_dictionary(path), Path(path) / str(kept[0])
            check(not several or split in kept, f"{where}: has no split {split}; give the directory of one, {one} say")
            return SourceConfig(path=path, split=split if several else "")
        own = Path(path) / Path(self.source or "").name
        files = [file for file in (own, own.with_name(own.name.removesuffix(".gz"))) if file.is_file()]
        if files:
            return SourceConfig(path=str(files[0]))
        has_configs = (Path(path) / "README.md").is_file()  # else they would be unknown
        return SourceConfig(path=path, name=self.hub.name if has_configs else None, split=split)

    def _check_size(self, count: int, key: str) -> None:
        """Say where there are fewer questions than were published, as in a part of one's own. Raises UserError for
        more: another split, or files of several."""
        if self.size is None or count == self.size:
            return
        said = f"{key}: {self.place} has {count:,} questions, and {self.title} has {self.size:,}"
        check(count < self.size, f"{said}: it is another set; give that, or suite={OWN} for a set of your own")
        _LOG.info("note: %s: figures are of a part of it", said)

    def _question(self, place: str, row: Row, line: int, key: str) -> Question:
        """A row's question, with the template and what the chat template is told."""
        question = question_of(self._renamed(place, row, key), place, line)
        known = self.categories is None or question.category in self.categories
        check(known, f"{place}: category={question.category}: {self.title} has {', '.join(self.categories or [])}")
        first, *later = question.turns
        turns = [first if self.template is None else self.template.replace(PROMPT, first), *later]
        variables = {} if self.thinking is None else {THINKING: self.thinking}
        return replace(question, turns=turns, variables=variables, key=key)

    def _renamed(self, place: str, row: Row, key: str) -> Row:
        """The row with the fields that questions are read from. Raises UserError for columns that it lacks."""
        has = f"the row has {', '.join(row) or 'nothing'}"
        columns = self.hub.columns
        if self.path is not None:  # of the hub's, or as it is published elsewhere
            columns = {name: each for name, each in columns.items() if name not in row and each in row} | self.columns
        columns = columns | ({} if self.category is None else {"category": self.category})
        for name, column in columns.items():
            what = "category" if name == "category" else f"columns.{name}"
            check(column in row, f"{place}: {key}.{what}={column}: no such column; {has}")
        named = row | {name: row[column] for name, column in columns.items()}
        lacks = [name for name in self.fields if name not in named]
        check(not lacks, f"{place}: no row of {self.title}, it lacks {', '.join(lacks)}; {has}")
        return named


TRAIN = "train"
KEYS = ("path", "columns", "category", "template")  # that users give


def suite_names() -> list[str]:
    """Those of conf/suite."""
    return sorted(path.stem for path in (CONF_DIR / "suite").glob("*.yaml"))


def suite_named(name: str, given: Mapping[str, Any] | None = None, key: str = "suite") -> Suite:
    """A suite of conf/suite, some of its keys replaced by `given`. Raises UserError, which names `key`."""
    check(name in suite_names(), f"{key}={shown(name)}: must be one of {', '.join(suite_names())}")
    return build(Suite, values_of(name) | dict(given or {}), key)


def values_of(name: str) -> dict[str, Any]:
    """What a suite's YAML says of it."""
    values = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "suite" / f"{name}.yaml"))
    return cast(dict[str, Any], values)["suite"]


def suite_of(values: Any) -> str | None:
    """The name of the suite that the key `suite` of a config says; None where it says none, or one that is unknown."""
    title = values.get("title") if isinstance(values, Mapping) else None
    return next((name for name in suite_names() if title and values_of(name)["title"] == title), None)


def given_of(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keys of a suite that a config gives other values than its YAML has."""
    own = values_of(name)
    given = {key: values[key] for key in (*KEYS, "thinking") if values.get(key, {}) != {}}
    return {key: value for key, value in given.items() if value != own.get(key)}
