"""A file of rows that a run writes as they are done, and that a later run of the same settings goes on with.

OUT has a row a line in JSON, with its number in `row`. OUT.left_out has the rows that are done and not in OUT, each
with the reason; OUT.settings.json what the rows were made with. Knows nothing of what is in a row.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle_train.corpus.rows import parse
from eagle_train.errors import HALF, SURROGATE, UserError, check, one_line
from eagle_train.results import provenance, write_json


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of JSON. Raises UserError for what JSON in UTF-8 cannot say."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise UserError("it is nested too deeply") from error
    except ValueError as error:
        raise UserError("it holds a number that JSON has not, NaN or an infinite one") from error
    except TypeError as error:
        raise UserError(f"it holds a value that JSON has not: {one_line(error)}") from error
    check(SURROGATE.search(text) is None, f"it holds {HALF}")
    return text + "\n"


class RowLog:
    """`done`: up to which row of the data all are done. `left_out`: numbers of those that are not in OUT.

    `settings`: what a row depends on. Raises UserError where OUT was made with others, or is somebody else's.
    """

    def __init__(self, out: Path, settings: dict[str, Any]):
        self.out, self.settings = out, settings
        # Beside OUT, but by no name that a glob of data would find.
        self.notes, self.others = out.with_name(f"{out.name}.settings.json"), out.with_name(f"{out.name}.left_out")
        self.done, self.left_out = 0, frozenset[int]()
        self.is_new = not out.exists()
        if not self.is_new:
            self.go_on()

    def go_on(self) -> None:
        told = f"out={self.out}: is there, but not {self.notes.name}, which a run writes; give another file"
        check(self.notes.exists(), told)
        earlier = json.loads(self.notes.read_text("utf-8"))["settings"]
        for key, value in self.settings.items():
            known = earlier.get(key)
            check(known == value, f"out={self.out}: was made with {key}={known}, not {value}; give another file")
        written, others = numbers_in(self.out), numbers_in(self.others)
        self.done, self.left_out = max(written | others, default=0), frozenset(others - written)
        print(f"{self.out}: goes on after row {self.done}", file=sys.stderr)

    def write(self, line: str) -> None:
        self.append(self.out, line)

    def leave_out(self, reasons: Iterable[tuple[int, str]]) -> None:
        self.append(self.others, "".join(line_of({"row": row, "reason": reason}) for row, reason in reasons))

    def append(self, path: Path, lines: str) -> None:
        if not lines:
            return
        if self.is_new:
            self.others.unlink(missing_ok=True)  # of an OUT that was taken away
            write_json(self.notes, {"settings": self.settings, "provenance": provenance()})
            self.is_new = False
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            told = f"out={self.out}: cannot be written: {one_line(error)}; the same command goes on"
            raise UserError(told) from error


def numbers_in(path: Path) -> set[int]:
    """The rows of a file, whose last line is dropped where a kill tore it."""
    if not path.exists():
        return set()
    numbers, end = set(), 0
    with path.open("rb+") as lines:
        for number, line in enumerate(lines, 1):
            if line.endswith(b"\n"):
                row = parse(f"{path}:{number}", line).get("row")
                check(isinstance(row, int), f"{path}:{number}: no run wrote this: it has no row")
                numbers.add(row)
                end += len(line)
        lines.truncate(end)
    return numbers
