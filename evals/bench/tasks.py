"""The tasks of a comparison: files of questions, the format that their rows show, and their licence.

Knows nothing of who answers.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.corpus.rows import Row
from eagle_train.errors import check, shown
from evals.bench.questions import Question, read_questions, rows_of

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")  # and those of MT-Bench
GROUPED = (
    "Spec-Bench's 13 categories are its 6 subtasks: those of MT-Bench (" + ", ".join(MT_BENCH) + ") are its multi-turn "
    "conversation, `mt_bench`; translation, summarization, qa, math_reasoning and rag are one each."
)
LICENCES = {  # as their publishers say
    "Spec-Bench": "Apache-2.0",
    "MT-Bench": "CC BY 4.0 (questions); Apache-2.0, as published in FastChat",
    "HumanEval": "MIT",
    "GSM8K": "MIT",
}
NOT_STATED = "not stated"

_SAID = re.compile(r"^[#>*_ \t-]*licen[cs]e[*_ \t]*:[*_ \t]*(\w[^|*\n]*?)[\W_]*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class Task:
    """`format`: a benchmark's name, or what the rows have. `licence`: as a row, a README beside the file, or the
    benchmark's publisher says. `too_long`: how many questions were left out."""

    name: str
    path: str
    format: str
    licence: str
    questions: list[Question]
    too_long: int = 0

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
        }


def read_tasks(given: Any) -> list[Task]:
    """The tasks of a file or a list of files, named as these, or of a mapping of names to files. Raises UserError."""
    files = given if isinstance(given, Mapping) else _named(given)
    wrong = f"tasks={shown(given)}: must be a file, a list of files, or a mapping of names to files"
    check(bool(files) and all(isinstance(each, str) for pair in files.items() for each in pair), wrong)
    return [_read(name, path) for name, path in files.items()]


def _named(given: Any) -> dict[str, str]:
    """The files of a list by their names without endings; by all of the path where two have the same."""
    paths = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else []
    names = [Path(str(path)).stem for path in paths]
    return {name if names.count(name) == 1 else path: path for name, path in zip(names, paths, strict=True)}


def _read(name: str, path: str) -> Task:
    questions = read_questions(path)
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
    return LICENCES.get(form, NOT_STATED)
