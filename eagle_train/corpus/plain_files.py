"""Rows of files of plain text: each file is one row, {"text": all of it}."""

from collections.abc import Iterator
from dataclasses import dataclass

from eagle_train.corpus.file_formats import reading
from eagle_train.corpus.json_files import LONGEST, files_identity
from eagle_train.corpus.rows import PlacedRow, Row, decode_text
from eagle_train.errors import check


@dataclass(frozen=True, slots=True)
class PlainRow:
    """A file's bytes, not yet decoded."""

    content: bytes

    def to_dict(self) -> Row:
        return {"text": decode_text(self.content)}


class PlainFiles:
    """A row for each file, plain, gzip or Zstandard. Raises UserError for one of LONGEST bytes or more."""

    def __init__(self, files: list[str]):
        self.files = files

    def identity(self) -> str:
        return files_identity(self.files)

    def rows(self, start: int = 0) -> Iterator[PlacedRow]:
        for file in self.files[start:]:
            with reading(file) as stream:
                content = stream.read(LONGEST)
            check(len(content) < LONGEST, f"{file}: is one text, and longer than {LONGEST} bytes: divide it")
            yield file, PlainRow(content)
