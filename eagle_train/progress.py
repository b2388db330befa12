"""Progress: a bar on a terminal, log records elsewhere. Knows nothing of what is done."""

import logging
import math
import sys
import time
from typing import Union

from tqdm import tqdm

from eagle_train.distributed import place

_LOG = logging.getLogger(__name__)
LINE_SECONDS = 5  # between two lines


def progress(total: int | None, unit: str, initial: int = 0) -> "Progress":
    """Progress from `initial` to `total` (None: not known) of what is counted in `unit`: "step", say. A job's first
    rank alone shows it."""
    if place()[0] > 0:
        return Silence()
    return (Bar if sys.stderr.isatty() else Lines)(total, unit, initial)


Progress = Union["Bar", "Lines", "Silence"]


class Silence:
    """What ranks show that are not the first."""

    def update(self, done: int, note: str = "") -> None:
        pass

    def close(self) -> None:
        pass


class Bar:
    """A bar that is redrawn in place."""

    def __init__(self, total: int | None, unit: str, initial: int) -> None:
        layout = "{unit} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}, {remaining} left{postfix}]"
        self.bar = tqdm(
            total=total,
            unit=unit,
            initial=initial,
            bar_format=None if total is None else layout,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def update(self, done: int, note: str = "") -> None:
        """Show that so much of the total is done, and a note beside it."""
        self.bar.set_postfix_str(note, refresh=False)
        self.bar.update(done - self.bar.n)

    def close(self) -> None:
        self.bar.close()


class Lines:
    """Lines of the log: the first, then one every LINE_SECONDS, then the last."""

    def __init__(self, total: int | None, unit: str, initial: int) -> None:
        self.total, self.unit, self.initial = total, unit, initial
        self.started = time.monotonic()
        self.printed = -math.inf

    def update(self, done: int, note: str = "") -> None:
        """Show that so much of the total is done, and a note beside it."""
        now = time.monotonic()
        is_last = self.total is not None and done >= self.total
        if not is_last and now - self.printed < LINE_SECONDS:
            return
        self.printed = now
        known = self.total is not None
        layout = self.unit + (" {n_fmt}/{total_fmt}, {elapsed}, {remaining} left" if known else " {n_fmt}, {elapsed}")
        line = tqdm.format_meter(
            done, self.total, now - self.started, initial=self.initial, bar_format=layout + "{postfix}", postfix=note
        )
        _LOG.info("%s", line)

    def close(self) -> None:
        """Nothing is left open."""
