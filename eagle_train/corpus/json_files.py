"""Rows of JSON files: one object a line, the elements of an array, or objects however they follow one another.

The file's beginning tells which. An array is cut into its elements' texts and never parsed
whole: no library does that, and so a large one is read as lines are, from any element on, by every rank its own rows.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO

from eagle_train.corpus.kinds import go_to, read_head, reading
from eagle_train.corpus.rows import PlacedRow
from eagle_train.errors import UserError, check

MARK_ROWS = 4096  # about as many as are read in vain when a run goes on
CHUNK = 1 << 20  # bytes of an array that are read at a time
LONGEST = 1 << 28  # bytes of an element: a quote that is missing must not take the memory
BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r\n"
# A string, whole or (at the end of what was read) not; or what an array or an object begins, divides or ends with.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)

Mark = tuple[int, int, int, int]
"""Where a row lies: its number, its file's, and how many bytes, and lines or elements, of the file are before it."""
Cut = tuple[bytes, int, int]
"""A row's text, and how many bytes, and lines or elements, are before it."""


def files_identity(files: list[str]) -> str:
    """A digest of the files' names and sizes."""
    listing = [[file, Path(file).stat().st_size] for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


class JsonFiles:
    """Rows of plain, gzip or Zstandard files; blank lines are no rows.

    Rows cannot be counted without being read, so it notes on its way where some of them lie; `marks` has the first
    such row of every MARK_ROWS. What is compressed is read up to a mark, but not cut into rows.
    """

    def __init__(self, files: list[str]):
        self.files = files
        self.marks: dict[int, Mark] = {}

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        mark = self.mark(start)
        return islice(self.rows_from(mark), start - mark[0], None)

    def mark(self, row: int) -> Mark:
        """The last mark that is not behind row number `row`."""
        known = (self.marks.get(place) for place in range(row // MARK_ROWS, -1, -1))
        return next((mark for mark in known if mark and mark[0] <= row), (0, 0, 0, 0))

    def remember(self, mark: Mark) -> None:
        """A mark that this source gave for the same files."""
        self.marks.setdefault(mark[0] // MARK_ROWS, mark)

    def rows_from(self, mark: Mark) -> Iterator[tuple[str, bytes]]:
        row, first, offset, before = mark
        for number, file in enumerate(self.files[first:], first):
            self.remember((row, number, offset, before))
            name, cuts = cuts_of(file, offset, before)
            for text, offset, before in cuts:
                self.remember((row, number, offset, before))
                yield f"{file}{name}{before + 1}", text
                row += 1
            offset = before = 0


def cuts_of(file: str, offset: int, before: int) -> tuple[str, Iterator[Cut]]:
    """What stands between a file's name and a row's number in the row's place, and the file's rows from a mark on.

    Raises UserError, here or in between, for a file that cannot be read, and for an array that does not end."""
    head = read_head(file)
    start = len(BOM) if head.startswith(BOM) else 0
    text = head[start:].lstrip(BLANKS)
    if text.startswith(b"["):
        begin = len(head) - len(text) + 1
        return ": element ", cut(file, offset or begin, before, in_array=True)
    if not are_lines(text):
        return ": object ", cut(file, offset or start, before, in_array=False)
    return ":", lines(file, offset or start, before)


def are_lines(text: bytes) -> bool:
    """Whether a file that begins so has an object a line: not if a second one stands in the first line, and not if the
    first has no end there, unless the next line is an object of its own: then the first is broken."""
    first, _, more = text.partition(b"\n")
    if not first.startswith(b"{"):
        return True
    end = end_of_object(first)
    if end is not None:
        return not first[end:].lstrip(BLANKS).startswith(b"{")
    second = more.lstrip(BLANKS).partition(b"\n")[0].rstrip()
    return second == b"" or (second.startswith(b"{") and end_of_object(second) == len(second))


def end_of_object(text: bytes) -> int | None:
    """Where the object that a text begins with ends, None if it does not."""
    depth = 0
    for token in TOKEN.finditer(text):
        sign = token[0]
        if sign == b'"':
            return None
        depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        if depth == 0:
            return token.end()
    return None


def lines(file: str, offset: int, before: int) -> Iterator[Cut]:
    with reading(file) as stream:
        go_to(stream, offset)
        for line in stream:
            if line.strip():
                yield line, offset, before
            offset, before = offset + len(line), before + 1


def cut(file: str, offset: int, before: int, in_array: bool) -> Iterator[Cut]:
    """Texts of the elements of an array, or of objects that follow one another, from the byte on that begins one."""
    with reading(file) as stream:
        go_to(stream, offset)
        text, at, depth, empty = b"", 0, 0, before == 0
        while more := stream.read(max(CHUNK, len(text))):
            text += more
            start = 0  # of the element in `text`, which begins at `offset`
            for token in TOKEN.finditer(text, at):
                at, sign = token.end(), token[0]
                if sign == b'"':  # it goes on behind what was read
                    at -= 1
                    break
                ends = depth == 0 and sign in (b",", b"]") if in_array else depth == 1 and sign == b"}"
                depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
                if ends:
                    place = at - 1 if in_array else at
                    last = in_array and sign == b"]"
                    if not (last and empty and not text[start:place].strip()):
                        yield text[start:place], offset + start, before
                    if last:
                        check_end(file, text[at:], stream)
                        return
                    start, before, depth, empty = at, before + 1, 0, False
                elif depth < 0:
                    raise UserError(f"{file}: {told(in_array, before)}: not JSON: {sign.decode()!r} ends nothing")
            else:
                at = len(text)
            text, at, offset = text[start:], at - start, offset + start
            check(len(text) < LONGEST, f"{file}: {told(in_array, before)}: not JSON: it has no end in {LONGEST} bytes")
        check(not in_array, f"{file}: {told(in_array, before)}: the file ends within its array; is all of it there?")
        if text.strip():
            yield text, offset, before


def told(in_array: bool, before: int) -> str:
    return f"{'element' if in_array else 'object'} {before + 1}"


def check_end(file: str, text: bytes, stream: IO[bytes]) -> None:
    """Raise UserError where anything but blanks is behind an array, of which `text` is known already."""
    blank = all(not part.strip() for part in (text, *iter(lambda: stream.read(CHUNK), b"")))
    check(blank, f"{file}: more follows behind the array's end; give one array, or an object a line")
