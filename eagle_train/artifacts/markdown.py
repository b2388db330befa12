"""Markdown as GitHub and the hub read it: any text escaped, as code, and in tables. Knows nothing of the contents."""

import re
import unicodedata
from collections.abc import Iterable, Sequence

from eagle_train.terminal import printable

# Characters that begin emphasis, code, links, HTML, entities, strikethrough or formulas; no underscores within words.
_SPECIAL = re.compile(r"[\\`*\[\]<~$]|&(?=[#\w])|(?<![^\W_])_|_(?![^\W_])")
_PIPE = re.compile(r"(\\*)\|")


def plain(text: str, longest: int | None = None) -> str:
    """Any text on one line, escaped; cut to at most `longest` characters."""
    line = printable(" ".join(text.split()))
    if longest is not None and len(line) > longest:
        line = line[: longest - 1].rstrip() + "…"
    return _SPECIAL.sub(lambda found: "\\" + found[0], line)


def code(text: str) -> str:
    """Any text on one line, as code."""
    line = printable(" ".join(text.splitlines())) or " "
    fence = "`" * (1 + max(map(len, re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> str:
    """A table of Markdown texts; `rule` is the delimiter of all columns but the first."""
    lines = [map(_cell, header), ["---", *[rule] * (len(header) - 1)], *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def aligned(markdown: str) -> str:
    """The same table with padded columns, for a terminal."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in markdown.splitlines()]
    rows = [[cell.strip() for cell in row] for row in rows]
    widths = [max(2, *map(_width, column)) for column in zip(rows[0], *rows[2:], strict=True)]
    right = [cell.endswith(":") for cell in rows[1]]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            _ruled(width, at_end) if number == 1 else _padded(cell, width, at_end)
            for cell, width, at_end in zip(row, widths, right, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """A Markdown text that cannot end its cell or its line."""
    line = " ".join(text.split())
    # A pipe ends the cell unless an odd number of backslashes stands before it.
    return _PIPE.sub(lambda found: found[1] + ("\\" if len(found[1]) % 2 == 0 else "\\\\") + "|", line)


def _ruled(width: int, at_end: bool) -> str:
    return "-" * (width - 1) + ":" if at_end else "-" * width


def _padded(cell: str, width: int, at_end: bool) -> str:
    space = " " * (width - _width(cell))
    return space + cell if at_end else cell + space


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)
