"""The tasks of a comparison: files of questions, the format that their rows show, and their licence; or suites.

Knows nothing of who answers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from eagle_train.corpus.rows import Row
from eagle_train.errors import check, shown
from evals.bench.naming import by_name
from evals.bench.questions import Question, read_questions, rows_of
from evals.bench.suites import OWN, Suite, suite_named, suite_names

_SUITES = {suite.title: suite for suite in map(suite_named, suite_names())}
_OF_A_SUITE = {"suite", *(each.name for each in fields(Suite))}
MT_BENCH = tuple(_SUITES["MT-Bench"].categories or ())
SPEC_BENCH = tuple(each for each in _SUITES["Spec-Bench"].categories or () if each not in MT_BENCH)
GROUPED = (
    "Spec-Bench's 13 categories are its 6 subtasks: those of MT-Bench (" + ", ".join(MT_BENCH) + ") are its multi-turn "
    f"conversation, `mt_bench`; {', '.join(SPEC_BENCH[:-1])} and {SPEC_BENCH[-1]} are one each."
)
NOT_STATED = "not stated"

_SAID = re.compile(r"^[#>*_ \t-]*licen[cs]e[*_ \t]*:[*_ \t]*(\w[^|*\n]*?)[\W_]*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Task:
    """`format`: a benchmark's name, or what the rows have. `licence`: as a row, a README beside the file, or the
    benchmark's publisher says. `too_long`: how many questions were left out. `suite`: what it was asked with, if it was
    named."""

    name: str
    path: str
    format: str
    licence: str
    questions: list[Question]
    too_long: int = 0
    suite: dict[str, Any] | None = None

    def group(self, question: Question) -> str | None:
        """The question's category; of Spec-Bench, the subtask that it belongs to."""
        is_turns = self.format == "Spec-Bench" and question.category in MT_BENCH
        return "mt_bench" if is_turns else question.category

    def about(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "name": self.name,
            "path": self.path,
            "format": self.format,
            "licence": self.licence,
            "questions": len(self.questions),
            "too_long": self.too_long,
            "suite": self.suite,
        }


def read_tasks(given: Any) -> list[Task]:
    """The tasks of a file or a list of files, named as these, or of a mapping of names to files. Raises UserError.

    In the place of a file there may be a suite's name; and in a list or a mapping {suite: NAME, path: FILE} with other
    keys of `Suite`.
    """
    are_named = isinstance(given, Mapping)
    entries = list(given.values()) if are_named else given if isinstance(given, list) else [given]
    lacks_name = are_named and bool(given) and set(given) <= _OF_A_SUITE
    check(not lacks_name, f"tasks={shown(given)}: is a suite without a name; give tasks={{NAME: {{suite: ...}}}}")
    wrong = f"tasks={shown(given)}: must be a file or a suite, a list of these, or a mapping of names to them"
    fits = all(isinstance(each, str | Mapping) for each in entries)
    check(bool(entries) and fits and (not are_named or all(isinstance(name, str) for name in given)), wrong)
    if are_named:
        return [_read(name, each, f"tasks.{name}") for name, each in given.items()]
    return [_read(name, each, "tasks") for name, each in by_name(entries, _short, "tasks").items()]


def _short(given: str | Mapping[str, Any]) -> str:
    """What an entry of a list is called: a suite as it is, a file without its ending."""
    if isinstance(given, str):
        return Path(given).stem
    suite = str(given.get("suite", OWN))
    return suite if suite != OWN or "path" not in given else Path(str(given["path"])).stem


def _read(name: str, given: str | Mapping[str, Any], key: str) -> Task:
    """`key`: of a file, for errors."""
    if isinstance(given, Mapping):
        keys = dict(given)
        return _read_suite(name, str(keys.pop("suite", OWN)), keys)
    return _read_suite(name, given, {}) if _is_suite(given) else _read_file(name, given, key)


def _is_suite(given: str) -> bool:
    return given in suite_names() and not Path(given).exists()


def _read_suite(name: str, suite: str, keys: Mapping[str, Any]) -> Task:
    key = f"tasks.{name}"
    chosen = suite_named(suite, keys, key)
    questions = chosen.read(key=key, give=f"{{suite: {suite}, path: FILE}}")
    licence = chosen.licence or NOT_STATED
    return Task(name, chosen.place, str(chosen.title), licence, questions, suite=chosen.about())


def _read_file(name: str, path: str, key: str) -> Task:
    questions = read_questions(path, key=key)
    if path.endswith(".txt"):
        return Task(name, path, "a prompt a line", _licence({}, path, ""), questions)
    _, first = next(iter(rows_of(path)))
    form = _format(first, {question.category for question in questions})
    return Task(name, path, form, _licence(first, path, form), questions)


def _format(row: Row, categories: set[str | None]) -> str:
    """By the fields of a row, and the categories of all."""
    if {"question_id", "category", "turns"} <= set(row):
        if categories <= {*MT_BENCH}:
            return "MT-Bench"
        if categories <= {*MT_BENCH, *SPEC_BENCH}:
            return "Spec-Bench"
    if {"task_id", "prompt", "entry_point"} <= set(row):
        return "HumanEval"
    if {"question", "answer"} <= set(row):
        return "GSM8K"
    return f"rows of {next(each for each in ('turns', 'messages', 'prompt', 'question') if each in row)}"


def _licence(row: Row, path: str, form: str) -> str:
    """What the row says, or a README in the file's folder, or the format's publisher."""
    own = next((row[key] for key in ("license", "licence") if isinstance(row.get(key), str)), None)
    if own:
        return str(own)
    for readme in sorted(Path(path).parent.glob("[Rr][Ee][Aa][Dd][Mm][Ee]*")):
        if readme.is_file() and (said := _SAID.search(readme.read_text("utf-8", errors="replace"))):
            return said[1]
    suite = _SUITES.get(form)
    return (suite and suite.licence) or NOT_STATED
