"""A JSONL file of rows, written as they are finished, that a later run with the same settings continues.

OUT has a row a line, with its number in `row`. OUT.left_out has the finished rows that are not in OUT, each with the
reason; OUT.settings.json the settings that the rows were made with. Knows nothing of what is in a row.
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle_train.corpus.rows import parse
from eagle_train.errors import HALF, SURROGATE, UserError, check, one_line
from eagle_train.results import provenance, write_json

_LOG = logging.getLogger(__name__)


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of JSON. Raises UserError for values that JSON in UTF-8 does not have."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    except ValueError as error:
        raise UserError("it holds a number that JSON does not have, NaN or an infinite one") from error
    except TypeError as error:
        raise UserError(f"it holds a value that JSON does not have: {one_line(error)}") from error
    check(SURROGATE.search(text) is None, f"it holds {HALF}")
    return text + "\n"


def earlier_settings(out: Path) -> dict[str, Any]:
    """The settings that the rows in OUT were made with; empty where there are none, or no run made them."""
    notes = _notes_of(out)
    found: dict[str, Any] = {}
    if out.exists() and notes.exists():
        found = json.loads(notes.read_text("utf-8"))["settings"]
    return found


def _notes_of(out: Path) -> Path:
    """Beside OUT, but with a name that no glob for data matches."""
    return out.with_name(f"{out.name}.settings.json")


class RowLog:
    """`done`: the number up to which all rows are finished. `left_out`: the numbers of finished rows not in OUT.

    `settings`: all that a row depends on. Raises UserError where OUT was made with other settings, or not by a run.
    """

    def __init__(self, out: Path, settings: dict[str, Any]):
        self.out, self.settings = out, settings
        self.notes, self.others = _notes_of(out), out.with_name(f"{out.name}.left_out")
        self.done, self.left_out = 0, frozenset[int]()
        self.is_new = not out.exists()
        if not self.is_new:
            self._resume()

    def write(self, line: str) -> None:
        self._append(self.out, line)

    def leave_out(self, reasons: Iterable[tuple[int, str]]) -> None:
        self._append(self.others, "".join(line_of({"row": row, "reason": reason}) for row, reason in reasons))

    def _resume(self) -> None:
        problem = f"out={self.out}: exists without {self.notes.name}, so no run wrote it; give another file"
        check(self.notes.exists(), problem)
        earlier = earlier_settings(self.out)
        for key, value in self.settings.items():
            known = earlier.get(key)
            check(known == value, f"out={self.out}: was made with {key}={known}, not {value}; give another file")
        written, others = _numbers_in(self.out), _numbers_in(self.others)
        self.done, self.left_out = max(written | others, default=0), frozenset(others - written)
        _LOG.info("%s: resumes after row %d", self.out, self.done)

    def _append(self, path: Path, lines: str) -> None:
        if not lines:
            return
        if self.is_new:
            self.others.unlink(missing_ok=True)  # of an earlier OUT that was removed
            write_json(self.notes, {"settings": self.settings, "provenance": provenance()})
            self.is_new = False
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            problem = f"out={self.out}: cannot be written: {one_line(error)}; the same command resumes"
            raise UserError(problem) from error


def _numbers_in(path: Path) -> set[int]:
    """The row numbers in a file. A last line that a kill left incomplete is removed."""
    if not path.exists():
        return set()
    numbers, end = set[int](), 0
    with path.open("rb+") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                row = parse(f"{path}:{number}", line).get("row")
                if not isinstance(row, int):
                    raise UserError(f"{path}:{number}: no run wrote this: it has no row")
                numbers.add(row)
                end += len(line)
        lines.truncate(end)
    return numbers
