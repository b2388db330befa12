"""A build from start to end: the data are counted, rendered, tokenised, and written shard by shard."""

import logging
import warnings
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_train.corpus.feed import Feed, MalformedRow
from eagle_train.corpus.preview import check_data
from eagle_train.corpus.source import check_found, field_of, pin
from eagle_train.distributed import ALONE
from eagle_train.errors import check
from eagle_train.inference.lookup.datastore_format import by_id, digest_of
from eagle_train.inference.lookup.datastore_writer import DatastoreWriter, made_of_earlier
from eagle_train.inference.lookup.suffix_array import SORT_BYTES
from eagle_train.models.loading import load_config
from eagle_train.one_writer import beside, one_writer
from eagle_train.progress import progress
from eagle_train.results import in_words
from eagle_train.retrieval.documents import Place, documents_from
from eagle_train.retrieval.options import DatastoreConfig
from eagle_train.retrieval.size import Size, check_room, size_of
from eagle_train.training.assembly import renderer_of, today

_LOG = logging.getLogger(__name__)
_REPORTED = 10  # malformed rows that are reported
_OF_A_SOURCE = ("path", "format", "columns", "roles", "assistant_pattern", "name", "split", "revision")


@dataclass(frozen=True)
class Built:
    """What a build wrote. `left_out`: malformed rows."""

    tokens: int
    documents: int
    shards: int
    disk_bytes: int
    left_out: int


def build_datastore(config: DatastoreConfig) -> Built:
    """Write an index of the data's texts, as tokens of the target, to the directory `config.out`.

    An interrupted build of the same data goes on behind its last shard. Of the target its tokenizer, chat template and
    stops are read, no weights. Raises UserError for data that cannot be read or rendered, for an index that is there
    already, and where the disk has not the room.
    """
    out = Path(config.out)
    with one_writer(out, beside(out)):
        return _built(config, out)


def _built(config: DatastoreConfig, out: Path) -> Built:
    data = config.data
    check(not out.exists(), f"out={out}: exists; give another directory, or remove it")
    check_found(data)
    earlier = made_of_earlier(out) or {}
    pin(data, earlier.get if earlier else None)
    data.date = data.date or earlier.get("data.date") or today()
    renderer = renderer_of(config.target, data, load_config(config.target))
    for note in check_data(data, renderer):
        warnings.warn(note, stacklevel=1)
    with closing(Feed(data, renderer, ALONE)) as feed:
        vocabulary = renderer.tokenizer.get_vocab()
        made_of = _made_of(config, feed, vocabulary)
        writer = DatastoreWriter(out, made_of, vocabulary, config.shard_tokens, list(Place()))
        size = size_of(feed, config.limit)
        _tell(writer, size)
        check_room(out, size.disk_bytes - writer.disk_bytes)
        return _write(writer, feed, size, config.limit)


def _made_of(config: DatastoreConfig, feed: Feed, vocabulary: dict[str, int]) -> dict[str, Any]:
    """All that the index depends on: a build goes on with another's shards only if these are the same."""
    data = config.data
    made_of: dict[str, Any] = {"target": config.target.path, "tokenizer": digest_of(by_id(vocabulary))}
    for name, source in data.sources.items():
        made_of |= {field_of(name, key): getattr(source, key) for key in _OF_A_SOURCE}
        made_of[field_of(name, "path") + " (names and sizes of the files)"] = feed.sources[name].identity()
    for key in ("supervise", "template_kwargs", "malformed"):
        made_of[f"data.{key}"] = getattr(data, key)
    made_of["data.date"] = data.date if feed.renderer.reads_clock else None
    made_of["chat template"] = feed.renderer.identity()
    return made_of | {"limit": config.limit, "shard_tokens": config.shard_tokens}


def _tell(writer: DatastoreWriter, size: Size) -> None:
    """Log what the index will take."""
    memory = SORT_BYTES * min(size.tokens, writer.shard_tokens)
    _LOG.info(
        "out=%s: about %s tokens in %s rows (by %d of them): %s on disk, and %s of memory while a shard is sorted",
        writer.out,
        f"{size.tokens:,}",
        f"{size.rows:,}",
        size.sampled,
        in_words(size.disk_bytes),
        in_words(memory),
    )


def _write(writer: DatastoreWriter, feed: Feed, size: Size, limit: int | None) -> Built:
    """Add all documents that the writer does not have yet, with progress, and close it."""
    start = place = Place(*writer.place)
    bar = progress(size.rows, "row", start.rows)
    for place, documents in documents_from(feed, start, limit):
        if isinstance(documents, MalformedRow):
            if place.left_out <= _REPORTED:
                warnings.warn(f"left out: {documents}", stacklevel=1)
        else:
            for document in documents:
                writer.add(document.tokens.numpy())
        writer.reached(list(place))
        bar.update(place.rows, f"{writer.tokens:,} tokens")
    bar.close()
    header = writer.close()
    return Built(header.tokens, header.documents, len(header.shards), writer.disk_bytes, place.left_out)
