"""A row of the data as it was read, with its place for errors, and its parsing into a dict.

Reading passes rows on unparsed; they are parsed where they are used, often in another process. Knows nothing of files.
"""

import json
from dataclasses import dataclass
from typing import Any

from eagle_train.errors import UserError, check, one_line

CAN_SKIP = "data.malformed=skip leaves such rows out"

Row = dict[str, Any]


@dataclass(frozen=True, eq=False, slots=True)
class ArrowRow:
    """A row of an Arrow batch, not yet converted to Python objects: converting takes longer than reading."""

    batch: Any  # pyarrow.RecordBatch
    number: int

    def read(self) -> Row:
        row = self.batch.slice(self.number, 1).to_pylist()[0]
        return {column.name: _as_json(row[column.name], column.type) for column in self.batch.schema}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the row alone; pyarrow would send the whole batch."""
        return dict, (self.read(),)


PlacedRow = tuple[str, Row | bytes | ArrowRow]
"""A row's place (FILE:LINE, FILE: element 3, FILE: row 7), and the row as it was read."""


def _as_json(value: Any, kind: Any) -> Any:
    """A value of an Arrow type as it would be in JSON.

    All structs of an Arrow column have the same fields, so a message without `tool_calls` has a null there. Null fields
    of structs are therefore dropped. Nulls in lists, maps and columns of JSON were in the data and are kept, and so are
    the row's own columns.
    """
    import pyarrow.types as types

    if value is None:
        return None
    if types.is_struct(kind):
        return {field.name: _as_json(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if types.is_map(kind):
        return {key: _as_json(item, kind.item_type) for key, item in value}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [_as_json(item, kind.value_type) for item in value]
    return _from_json(value) if getattr(kind, "extension_name", None) == "arrow.json" else value


def _from_json(text: str) -> Any:
    """The value of a column of JSON; text that is no JSON, which Arrow allows, is kept."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def behind_place(place: str, error: UserError) -> str:
    """An error's message with the row's place before it, unless the message begins with it."""
    return str(error) if str(error).startswith(place) else f"{place}: {error}"


def parse(place: str, row: Row | bytes | ArrowRow) -> Row:
    """A row as a dict. Raises UserError, with the place, for text that is not one JSON object in UTF-8."""
    if isinstance(row, dict):
        return row
    if isinstance(row, ArrowRow):
        return row.read()
    try:
        value = json.loads(row.decode("utf-8-sig"))  # concatenated files have byte order marks within
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: not UTF-8: {one_line(error)}; iconv -t UTF-8 converts a file") from error
    except RecursionError as error:
        raise UserError(f"{place}: arrays and objects are nested too deeply to be read") from error
    except json.JSONDecodeError as error:
        check(b"\0" not in row, f"{place}: holds NUL bytes, so the file was not written completely")
        raise UserError(f"{place}: not JSON: {one_line(error)}") from error
    except ValueError as error:  # Python limits the digits of an integer
        raise UserError(f"{place}: holds a number with too many digits") from error
    check(isinstance(value, dict), f"{place}: a row must be a JSON object, not {type(value).__name__}")
    return value
