"""A row of the data as it was read, with its place for error messages, and how it becomes a dict.

Knows nothing of where rows are read from. Reading hands rows on unparsed: who needs one parses it, in another process
perhaps.
"""

import json
from dataclasses import dataclass
from typing import Any

from eagle_train.errors import UserError, check, one_line

CAN_SKIP = "data.malformed=skip leaves such rows out"

Row = dict[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class ArrowRow:
    """A row of a batch of Arrow's, not yet one of Python's: that takes longer than reading it."""

    batch: Any  # pyarrow.RecordBatch
    number: int

    def read(self) -> Row:
        row = self.batch.slice(self.number, 1).to_pylist()[0]
        return {column.name: as_json(row[column.name], column.type) for column in self.batch.schema}

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process the row goes alone; pyarrow would send the batch."""
        return dict, (self.read(),)


PlacedRow = tuple[str, Row | bytes | ArrowRow]
"""Where a row is (FILE:LINE, FILE: element 3, FILE: row 7), and the row as it was read."""


def as_json(value: Any, kind: Any) -> Any:
    """A value of an Arrow type as it would be in JSON.

    All structs of a column have the same fields in Arrow: where a message has no `tool_calls`, or a schema not the
    properties of another one, they are null. So a null field of a struct is left out. A null in a list or a map, and
    one within a column of JSON, was in the data, and stays; a row's own columns stay, too.
    """
    import pyarrow.types as types

    if value is None:
        return None
    if types.is_struct(kind):
        return {field.name: as_json(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if types.is_map(kind):
        return {key: as_json(item, kind.item_type) for key, item in value}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [as_json(item, kind.value_type) for item in value]
    return from_json(value) if getattr(kind, "extension_name", None) == "arrow.json" else value


def from_json(text: str) -> Any:
    """The value of a column of JSON; Arrow does not see to it that there is one, and the text is then left."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def behind_place(place: str, error: UserError) -> str:
    """What is wrong with a row, behind its place, which the error may tell itself."""
    return str(error) if str(error).startswith(place) else f"{place}: {error}"


def parse(place: str, row: Row | bytes | ArrowRow) -> Row:
    """A row as a dict. Raises UserError, with the place, for text that is not one JSON object in UTF-8."""
    if isinstance(row, dict):
        return row
    if isinstance(row, ArrowRow):
        return row.read()
    try:
        value = json.loads(row.decode("utf-8-sig"))  # a file that was put together of others has their marks within
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8: {one_line(error)}; iconv -t UTF-8 converts a file") from error
    except RecursionError as error:
        raise UserError(f"{place}: arrays and objects are nested too deeply to be read") from error
    except json.JSONDecodeError as error:
        check(b"\0" not in row, f"{place}: holds NUL bytes, as a file does that was not written to its end")
        raise UserError(f"{place}: not JSON: {one_line(error)}") from error
    except ValueError as error:  # Python bounds the digits of a whole number
        raise UserError(f"{place}: holds a number of too many digits") from error
    check(isinstance(value, dict), f"{place}: a row must be a JSON object, not {type(value).__name__}")
    return value
