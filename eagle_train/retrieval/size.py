"""The size of an index before it is built: rows are counted, and the tokens of some of them."""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from eagle_train.corpus.feed import Feed, MalformedRow, received, render
from eagle_train.errors import check
from eagle_train.inference.lookup.datastore_format import TOKEN_BYTES
from eagle_train.progress import progress
from eagle_train.results import in_words
from eagle_train.retrieval.documents import Place, rows_from

SAMPLE = 256  # rows that are tokenised for the estimate


@dataclass(frozen=True)
class Size:
    """`rows`: their number; `tokens`: an estimate of theirs, a separator behind each document included; `sampled`: the
    rows that it is made from."""

    rows: int
    tokens: int
    sampled: int

    @property
    def disk_bytes(self) -> int:
        return self.tokens * TOKEN_BYTES


def size_of(feed: Feed, limit: int | None) -> Size:
    """Count the rows, and the tokens of SAMPLE rows that are drawn from all of them with equal chances.

    Raises UserError as reading and rendering rows does.
    """
    draw = random.Random(0)
    sample: list[int] = []  # tokens of the rows that are drawn so far
    bar, rows = progress(None, "row counted"), 0
    for rows, row in enumerate(rows_from(feed, Place(), limit), 1):
        place = rows - 1 if rows <= SAMPLE else draw.randrange(rows)
        if place < SAMPLE:
            rendered = render(row.placed, feed.config.sources[row.source], feed.renderer)
            documents = received(rendered, feed.config)
            known = [] if isinstance(documents, MalformedRow) else documents
            sample[place : place + 1] = [sum(document.tokens.numel() + 1 for document in known)]
        bar.update(rows)
    bar.close()
    return Size(rows, round(sum(sample) / max(1, len(sample)) * rows), len(sample))


def check_room(out: Path, needed: int) -> None:
    """Raise UserError where the disk of `out` has not so many bytes left."""
    folder = next(parent for parent in out.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    problem = f"out={out}: needs about {in_words(needed)}, and its disk has {in_words(free)} left"
    check(needed <= free, f"{problem}; give another directory, or limit=ROWS")
