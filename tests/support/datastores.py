"""Small datastores for tests, and lookups in lists of documents that need no index."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from eagle_train.inference.lookup.datastore_writer import DatastoreWriter

Documents = Sequence[Sequence[int]]
Path_ = tuple[int, ...]


def vocabulary_of(size: int) -> dict[str, int]:
    return {f"t{number}": number for number in range(size)}


def fill(writer: DatastoreWriter, documents: Documents) -> None:
    """Add the documents that are not in it yet; a place is the number of documents before it."""
    for number in range(writer.place, len(documents)):
        writer.add(np.array(documents[number], dtype=np.int64))
        writer.reached(number + 1)


def write_datastore(out: Path, documents: Documents, shard_tokens: int = 1 << 20, vocabulary: int | dict = 64) -> Path:
    known = vocabulary_of(vocabulary) if isinstance(vocabulary, int) else vocabulary
    writer = DatastoreWriter(out, {}, known, shard_tokens, 0)
    fill(writer, documents)
    writer.close()
    return out


def hits(documents: Documents, context: Sequence[int], max_match: int, least: int) -> tuple[int, list[Path_]]:
    """The length of the longest end of the context that is in the documents, and what follows wherever it is."""
    for length in range(min(max_match, len(context)), least - 1, -1):
        end = tuple(context[len(context) - length :])
        found = [
            tuple(document[start + length :])
            for document in map(tuple, documents)
            for start in range(len(document) - length + 1)
            if document[start : start + length] == end
        ]
        if found:
            return length, found
    return 0, []


def most_frequent(found: Iterable[Path_], depth: int, max_nodes: int) -> dict[Path_, int]:
    """The most frequent beginnings, with their counts."""
    counts = Counter(path[:end] for path in found for end in range(1, min(depth, len(path)) + 1))
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], len(pair[0]), pair[0]))[:max_nodes])


def paths_of(tokens: list[int], parents: list[int]) -> list[Path_]:
    """Of each node but the root, the tokens from the root to it."""
    paths: list[Path_] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]
