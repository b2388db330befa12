"""Rows of JSON files: an object a line, the elements of one array, or objects one after another.

The beginning of the file decides. An array is cut into the texts of its elements and never parsed whole, so a large one
is read like lines: from any element on, and each rank parses its own rows.
"""

import hashlib
import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from eagle_train.corpus.file_formats import go_to, read_head, reading
from eagle_train.corpus.rows import PlacedRow
from eagle_train.errors import UserError, check

MARK_ROWS = 4096  # rows between marks: a resumed run skips at most about as many
CHUNK = 1 << 20  # bytes of an array in one read
LONGEST = 1 << 28  # bytes of an element: a missing quote must not fill the memory
_BOM = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
# A string, a quote whose string goes on behind the chunk, or a bracket, brace or comma.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{},]', re.DOTALL)

Mark = tuple[int, int, int, int]
"""A row's place: its number, its file's number, and the bytes and lines (or elements) of the file before it."""
_Cut = tuple[bytes, int, int]
"""A row's text, and the bytes and lines (or elements) of the file before it."""


def files_identity(files: list[str]) -> str:
    """A digest of the files' names and sizes. Raises UserError for one that is not there, or not any more."""
    listing = [[file, _size_of(file)] for file in files]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def _size_of(file: str) -> int:
    try:
        return Path(file).stat().st_size
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error


class JsonFiles:
    """Rows of plain, gzip or Zstandard files; blank lines are no rows.

    A row's byte offset is known only after the rows before it were read, so `marks` keeps one place per MARK_ROWS rows
    on the way. A compressed file is decompressed up to a mark, but not cut into rows.
    """

    def __init__(self, files: list[str]):
        self.files = files
        self.marks: dict[int, Mark] = {}

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        mark = self.mark(start)
        return islice(self._rows_from(mark), start - mark[0], None)

    def mark(self, row: int) -> Mark:
        """The last known mark at or before row number `row`."""
        known = (self.marks.get(place) for place in range(row // MARK_ROWS, -1, -1))
        return next((mark for mark in known if mark and mark[0] <= row), (0, 0, 0, 0))

    def remember(self, mark: Mark) -> None:
        """Keep a mark that `mark` returned earlier for the same files."""
        self.marks.setdefault(mark[0] // MARK_ROWS, mark)

    def _rows_from(self, mark: Mark) -> Iterator[tuple[str, bytes]]:
        row, first, offset, before = mark
        for number, file in enumerate(self.files[first:], first):
            self.remember((row, number, offset, before))
            name, cuts = cuts_of(file, offset, before)
            for text, offset, before in cuts:
                self.remember((row, number, offset, before))
                yield f"{file}{name}{before + 1}", text
                row += 1
            offset = before = 0


def cuts_of(file: str, offset: int, before: int) -> tuple[str, Iterator[_Cut]]:
    """The text between file name and row number in a row's place, and the file's rows from a mark on.

    Raises UserError, also while rows are drawn, for a file that cannot be read or an array that does not end.
    """
    head = read_head(file)
    start = len(_BOM) if head.startswith(_BOM) else 0
    text = head[start:].lstrip(_BLANKS)
    if text.startswith(b"["):
        begin = len(head) - len(text) + 1
        return ": element ", _cut(file, offset or begin, before, in_array=True)
    if not _are_lines(text):
        return ": object ", _cut(file, offset or start, before, in_array=False)
    return ":", _lines(file, offset or start, before)


def _are_lines(text: bytes) -> bool:
    """Whether a file that begins with `text` has an object a line.

    Not if the first line holds two objects, nor if its object does not end there, unless the second line is a whole
    object: then the first line is malformed.
    """
    first, _, more = text.partition(b"\n")
    if not first.startswith(b"{"):
        return True
    end = _end_of_object(first)
    if end is not None:
        return not first[end:].lstrip(_BLANKS).startswith(b"{")
    second = more.lstrip(_BLANKS).partition(b"\n")[0].rstrip()
    return second == b"" or (second.startswith(b"{") and _end_of_object(second) == len(second))


def _end_of_object(text: bytes) -> int | None:
    """Where the object at the beginning of a text ends; None if it does not."""
    depth = 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign == b'"':
            return None
        depth += (sign in (b"[", b"{")) - (sign in (b"]", b"}"))
        if depth == 0:
            return token.end()
    return None


def _lines(file: str, offset: int, before: int) -> Iterator[_Cut]:
    with reading(file) as stream:
        go_to(stream, offset)
        for line in stream:
            if line.strip():
                yield line, offset, before
            offset, before = offset + len(line), before + 1


def _cut(file: str, offset: int, before: int, in_array: bool) -> Iterator[_Cut]:
    """Texts of an array's elements, or of objects one after another, from a byte on at which one begins."""
    with reading(file) as stream:
        go_to(stream, offset)
        text, at, depth, empty = b"", 0, 0, before == 0
        while more := stream.read(max(CHUNK, len(text))):
            text += more
            start = 0  # where the current element begins in `text`; `text` begins at `offset` of the file
            for token in _TOKEN.finditer(text, at):
                at, sign = token.end(), token[0]
                if sign == b'"':  # the string goes on behind this chunk: read more, look again
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
                        _check_end(file, text[at:], stream)
                        return
                    start, before, depth, empty = at, before + 1, 0, False
                elif depth < 0:
                    raise UserError(
                        f"{file}: {_item_name(in_array, before)}: not JSON: {sign.decode()!r} closes nothing"
                    )
            else:
                at = len(text)
            text, at, offset = text[start:], at - start, offset + start
            check(
                len(text) < LONGEST,
                f"{file}: {_item_name(in_array, before)}: not JSON: it does not end within {LONGEST} bytes",
            )
        check(not in_array, f"{file}: {_item_name(in_array, before)}: the file ends within its array; is it complete?")
        if text.strip():
            yield text, offset, before


def _item_name(in_array: bool, before: int) -> str:
    return f"{'element' if in_array else 'object'} {before + 1}"


def _check_end(file: str, text: bytes, stream: io.BufferedIOBase) -> None:
    """Raise UserError unless only white space follows an array: `text`, and the rest of the stream."""
    blank = all(not part.strip() for part in (text, *iter(lambda: stream.read(CHUNK), b"")))
    check(blank, f"{file}: more follows after the array; give one array, or an object a line")
