"""What a terminal is sent: colours where they are wanted, texts of others without what would command it, log records.

Knows nothing of what is shown.
"""

import logging
import os
import re
import sys
from typing import TextIO

COLORS = ("auto", "always", "never")
# Bold beside the colour, for eyes and screens that do not tell green from the rest.
GREEN, RESET = "\033[1m\033[32m", "\033[0m"
# Control characters but newline and tab (with them all escape sequences), what turns the direction of writing, line
# separators and invisible marks that are no newline, halves of characters, which no encoding has, and noncharacters.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]")


def printable(text: str) -> str:
    r"""`text` with all that a terminal would obey and not show as Python writes it: `\x1b[2J`. Newline and tab stay."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def wants_color(choice: str, stream: TextIO) -> bool:
    """Whether `stream` is to be sent colours. `choice`: `always`, `never`, or `auto`: a terminal, but no dumb one, and
    not where NO_COLOR is set.
    """
    assert choice in COLORS, choice
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def log_to_stderr() -> None:
    """Show the log of this project, from INFO on, on stderr: plain lines, warnings with `warning: ` before them.

    Commands call it. A program of one's own sets up logging as it likes; the loggers have the names of the modules.
    """
    for name in ("eagle_train", "evals"):
        logger = logging.getLogger(name)
        logger.handlers = [_Stderr()]
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library that configures the root logger would show each line twice


class _Stderr(logging.Handler):
    """Writes to what `sys.stderr` is when a record comes, at once."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "warning: " if record.levelno >= logging.WARNING else ""
        try:
            print(f"{prefix}{self.format(record)}", file=sys.stderr, flush=True)
        except OSError as error:  # a file on a full disk, say, of which this may be the warning
            if isinstance(error, BrokenPipeError):
                raise
