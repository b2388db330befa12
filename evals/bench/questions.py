"""Files of questions: of a benchmark, or any file of prompts. Knows nothing of targets or tokens."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from eagle_train.corpus.conversations import Message, to_messages
from eagle_train.corpus.file_formats import check_contents
from eagle_train.corpus.json_files import JsonFiles
from eagle_train.corpus.rows import Row, parse
from eagle_train.corpus.source import hint
from eagle_train.errors import SURROGATE, UserError, check, foreign, shown


@dataclass(frozen=True)
class Question:
    """`turns`: the user's messages, each of which follows the target's answer to the one before.

    `history`: the messages before the first turn. `reference`: the file's own answer, where it has one; the target
    never sees it. `line`: the question's place, from 1, which no other one of the set has: its line in the file, its
    element of an array, or its row among those of several files. `variables`: what the chat template is told beside the
    messages; `key`: of the suite that says so, for errors.
    """

    line: int
    id: str | int
    category: str | None
    history: list[Message]
    turns: list[str]
    reference: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    key: str = "suite"


def read_questions(path: str, limit: int | None = None, key: str = "questions") -> list[Question]:
    """The questions of a JSON file (an object a line, or an array), or `limit` of them, taken evenly over the file.

    A row has `turns` (MT-Bench, Spec-Bench), `messages` (the last user turn is the question, the assistant's answer to
    it the reference), `prompt` (HumanEval), or `question` and maybe `answer` (GSM8K); and may have `question_id`,
    `task_id` or `id`, and `category`. In a file whose name ends in .txt each line is a prompt, but for empty ones.
    `key`: the config's, for errors.
    Raises UserError for a file that is missing or empty and, with its line, for a row that is malformed or empty.
    """
    known = f"{said}; or give {key}=FILE" if (said := hint(path)) else "; give a JSON file"
    check(Path(path).is_file(), f"{key}={path}: no such file{known}")
    if path.endswith(".txt"):
        questions = _lines_of(path, key)
    else:
        questions = [question_of(row, place, line_of(place)) for place, row in rows_of(path)]
    check(len(questions) > 0, f"{key}={path}: the file is empty; give a question a line")
    return evenly(questions, limit)


def evenly(questions: list[Question], limit: int | None) -> list[Question]:
    """`limit` of the questions, taken evenly, or all. Raises UserError for a limit below 1."""
    check(limit is None or limit >= 1, f"limit={limit}: must be at least 1, or null for all questions")
    count = min(limit or len(questions), len(questions))
    return [questions[i * len(questions) // count] for i in range(count)]


def rows_of(path: str) -> Iterator[tuple[str, Row]]:
    """The rows of a JSON file, each with its place, FILE:LINE. Raises UserError for what is no JSON object."""
    check_contents(path)
    return ((place, parse(place, row)) for place, row in JsonFiles([path]).rows())


def _lines_of(path: str, key: str) -> list[Question]:
    """A question for each line with text."""
    with foreign(f"{key}={path}"):
        lines = Path(path).read_text("utf-8-sig").split("\n")  # a text may hold other signs that end lines
    return [Question(number, number, None, [], [line]) for number, line in enumerate(lines, 1) if line.strip()]


def line_of(place: str) -> int:
    """The number that a row's place ends with, as FILE:LINE does."""
    return int(re.findall(r"\d+$", place)[0])


def question_of(row: Row, place: str, line: int) -> Question:
    """The question of a row, in which null is as no field: Arrow has all columns in each row. Raises UserError that
    begins with the row's place."""
    row = {key: value for key, value in row.items() if value is not None}
    try:
        history, turns, reference = _parts_of(row)
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
    category = row.get("category")
    said = "must be a text or a number, or left out"
    check(category is None or _is_name(category), f"{place}: category={shown(category)}: {said}")
    name: Any = next((row[key] for key in ("question_id", "task_id", "id") if key in row), line)
    check(_is_name(name), f"{place}: question_id={shown(name)}: {said}")
    category = None if category is None else str(category).strip() or None  # sorted as texts, whatever a file has
    return Question(line, name, category, history, turns, reference)


def _is_name(value: Any) -> bool:
    """Whether it is a text or a number that JSON can hold."""
    if isinstance(value, str):
        return SURROGATE.search(value) is None
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _parts_of(row: Row) -> tuple[list[Message], list[str], str | None]:
    """History, turns and reference of a row."""
    if "turns" in row:
        return [], _texts(row["turns"], "turns"), None
    if "messages" not in row:
        field = "prompt" if "prompt" in row else "question"
        check(field in row, f"the row has no turns, messages, prompt or question; it has {', '.join(row) or 'nothing'}")
        answer = row.get("answer") if field == "question" else None
        return [], _texts([row[field]], field), answer if isinstance(answer, str) else None
    messages = to_messages(row, "messages", {})
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    check(len(asked) > 0, "the row has no turns of a user: messages must hold a question")
    answers = [m["content"] for m in messages[asked[-1] + 1 :] if m["role"] == "assistant"]
    return messages[: asked[-1]], _texts([messages[asked[-1]]["content"]], "messages"), answers[0] if answers else None


def _texts(values: Any, field: str) -> list[str]:
    """A list of texts, none of them blank. Raises UserError for anything else."""
    check(isinstance(values, list) and len(values) > 0, f"{field}: the row has no turns; give a list of texts")
    for value in values:
        check(isinstance(value, str) and bool(value.strip()), f"{field}: a turn must be a text, not {value!r}")
    return values
