"""The documents of an index: the data's rows in their own order, one data set after the other, each read once."""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from eagle_train.corpus.feed import CHUNK, Drawn, Feed, MalformedRow, received
from eagle_train.corpus.tokens import Document


class Place(NamedTuple):
    """How far the rows are read: the number of the data set, and how many of its rows. Of all data sets: the rows that
    are read, and those of them that were malformed and left out."""

    source: int = 0
    of_source: int = 0
    rows: int = 0
    left_out: int = 0


def rows_from(feed: Feed, place: Place, limit: int | None) -> Iterator[Drawn]:
    """The rows behind a place, not parsed. `limit`: how many rows of each data set."""
    for number, (name, source) in enumerate(feed.sources.items()):
        if number >= place.source:
            start = place.of_source if number == place.source else 0
            rows = islice(source.rows(start), None if limit is None else max(0, limit - start))
            yield from (Drawn(name, 0, row, placed) for row, placed in enumerate(rows, start + 1))


def documents_from(
    feed: Feed, place: Place, limit: int | None
) -> Iterator[tuple[Place, list[Document] | MalformedRow]]:
    """The documents of each row behind `place`, and the place behind the row.

    Rows are rendered ahead where `data.workers` do it. Raises UserError, with the row's place, for a malformed row
    unless `data.malformed` skips it.
    """
    names = list(feed.sources)
    rows = rows_from(feed, place, limit)
    ahead: deque[tuple[list[Drawn], Callable[[], list]]] = deque()
    read, left_out = place.rows, place.left_out
    while True:
        while len(ahead) <= 2 * feed.config.workers and (chunk := list(islice(rows, CHUNK))):
            ahead.append((chunk, feed.submit(chunk)))
        if not ahead:
            return
        chunk, rendered = ahead.popleft()
        for drawn, each in zip(chunk, rendered(), strict=True):
            documents = received(each, feed.config)
            read, left_out = read + 1, left_out + isinstance(documents, MalformedRow)
            yield Place(names.index(drawn.source), drawn.number, read, left_out), documents
