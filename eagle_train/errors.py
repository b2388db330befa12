"""A user's mistake as one line: the field, its value, and what would be right. Knows nothing of the rest of the package
but how a terminal is written to. DESIGN section 3.11.
"""

import difflib
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from eagle_train.terminal import printable

SURROGATE = re.compile("[\\ud800-\\udfff]")  # what a text of JSON may hold and UTF-8 may not
HALF = "half of a surrogate pair: no text can be made of it"
_TYPED = {"None": "null", "True": "true", "False": "false"}
# Values as Python has them: of a field, "overlap=None", or of what is right, "must be True or False, or None".
_PYTHONS = re.compile(r"(?:(?<==)|(?<=\bbe )|(?<=\bor ))(?:None|True|False)(?![\w./-])")


class UserError(Exception):
    """A user's mistake, told in one line: the field, its value, and what would be right."""


class OptionError(UserError):
    """A mistake in a field of a class of options. It begins with the field's name, as in Python: "kv_tokens=8: ...".

    A command's user knows the field by another name, `engine.kv_tokens`; see `within`. `others`: the fields of the same
    class that the message names behind its first colon.
    """

    def __init__(self, message: str, *others: str):
        super().__init__(message)
        self.others = others

    def in_group(self, group: str) -> str:
        """The message with each field as it is typed on a command line, GROUP.FIELD."""
        field, colon, rest = str(self).partition(":")
        for other in self.others:
            rest = re.sub(rf"\b{other}\b", f"{group}.{other}", rest)
        return f"{group}.{field}{colon}{rest}"


def check(condition: bool, message: str, kind: type[UserError] = UserError) -> None:
    """Raise UserError(message), or that `kind` of it, unless `condition` holds."""
    if not condition:
        raise kind(message)


@contextmanager
def within(group: str) -> Iterator[None]:
    """Tell an OptionError with fields as typed on a command line: GROUP.FIELD, or FIELD where `group` is empty.

    For what reads the options of such a group, as a decorator too.
    """
    try:
        yield
    except OptionError as error:
        raise UserError(error.in_group(group) if group else str(error)) from error


def one_line(error: BaseException | None) -> str:
    """The first line of a library's message, which is the one that says what is wrong."""
    return " ".join(str(error).strip().split("\n")[0].split())


def did_you_mean(name: str, known: Iterable[str], above: str = "", least: float = 0.6) -> str:
    """The one of `known` that a misspelt name is nearest to, as the end of a message; empty where none is near.

    `above` stands before it in the message; `least`: see `difflib.get_close_matches`.
    """
    found = difflib.get_close_matches(name, sorted(known), 1, least)
    return f"; did you mean {above}{found[0]}?" if found else ""


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """What a library raises meanwhile becomes a UserError: `what`, and the first line of what it said."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # libraries raise what they like
        kind = "" if isinstance(error, OSError | ValueError | ImportError) else f"{type(error).__name__}: "
        raise UserError(f"{what}: {kind}{one_line(error)}") from error


class _Short(reprlib.Repr):
    def repr_int(self, number: int, level: int) -> str:
        """Python refuses to write the longest."""
        bits = number.bit_length()
        return super().repr_int(number, level) if bits < 14_000 else f"a whole number of {bits} bits"


def shown(value: Any) -> str:
    """What there is to see of a value, however large, on one line."""
    short = _Short()
    short.maxlevel, short.maxstring, short.maxother = 2, 60, 60
    return " ".join(short.repr(value).split())


def typed(value: Any) -> str:
    """A value as a user types it on a command line: null, true, [2, 4]."""
    return _TYPED.get(repr(value), str(value))


def report(error: UserError) -> int:
    """Print a user's mistake, with null, true and false as they are typed; returns the exit status."""
    told = _PYTHONS.sub(lambda found: _TYPED[found[0]], " ".join(str(error).split()))
    sys.stderr.write(f"error: {printable(told)}\n")  # at once, so that ranks' lines do not mix
    return 2
