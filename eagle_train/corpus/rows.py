"""A row of the data as it was read, with its place for errors, and its parsing into a dict.

Reading passes rows on unparsed; they are parsed where they are used, often in another process. Knows nothing of files.
"""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from eagle_train.errors import UserError, check, one_line

CAN_SKIP = "data.malformed=skip leaves such rows out"

Row = dict[str, Any]


class UnparsedRow(Protocol):
    """A row that is neither a dict nor JSON, on its way to the process that uses it. It can be pickled."""

    def to_dict(self) -> Row:
        """The row by column. Raises UserError, without the place, for a malformed one."""


@dataclass(frozen=True, eq=False, slots=True)
class ArrowRow:
    """A row of an Arrow batch, not yet converted to Python objects: converting takes longer than reading."""

    batch: Any  # pyarrow.RecordBatch
    number: int

    def to_dict(self) -> Row:
        """The row as Python objects, its values as in JSON. Raises UserError where Python has no such value."""
        try:
            row = self.batch.slice(self.number, 1).to_pylist()[0]
        except (ValueError, OverflowError) as error:  # text that is not UTF-8, or a time that Python does not have
            raise UserError(f"cannot be read: {one_line(error)}") from error
        return {column.name: _as_json(row[column.name], column.type) for column in self.batch.schema}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the row alone; pyarrow would send the whole batch."""
        try:
            return dict, (self.to_dict(),)
        except UserError as error:  # told where the row is used
            return UnreadableRow, (str(error),)


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """One that cannot be read, on its way to the process that would use it."""

    reason: str

    def to_dict(self) -> Row:
        raise UserError(self.reason)


PlacedRow = tuple[str, Row | bytes | UnparsedRow]
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


def parse(place: str, row: Row | bytes | UnparsedRow) -> Row:
    """A row as a dict. Raises UserError, with the place, for a malformed one."""
    if isinstance(row, dict):
        return row
    try:
        return _json_object(row) if isinstance(row, bytes) else row.to_dict()
    except UserError as error:
        raise UserError(f"{place}: {error}") from error


def decode_text(text: bytes) -> str:
    """A row's text, which is UTF-8. Raises UserError, without the place, for other encodings."""
    try:
        return text.decode("utf-8-sig")  # concatenated files have byte order marks within
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8: {one_line(error)}; iconv -t UTF-8 converts a file") from error


def _json_object(text: bytes) -> Row:
    try:
        value = json.loads(decode_text(text))
    except RecursionError as error:
        raise UserError("arrays and objects are nested too deeply to be read") from error
    except json.JSONDecodeError as error:
        check(b"\0" not in text, "holds NUL bytes, so the file was not written completely")
        raise UserError(f"not JSON: {one_line(error)}") from error
    except ValueError as error:  # Python limits the digits of an integer
        raise UserError("holds a number with too many digits") from error
    check(isinstance(value, dict), f"a row must be a JSON object, not {type(value).__name__}")
    return value
