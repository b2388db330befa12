"""Continuations of a text out of a datastore of other texts, as retrieval-based speculative decoding drafts them.

The longest end of the text that the datastore holds is found by binary search in the order of all suffixes; what
follows there, cut to a tree of the most frequent beginnings, is the draft (REST; He et al., 2023). Shards are mapped
into memory: a lookup touches a few pages of them.
"""

import mmap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_train.errors import check
from eagle_train.inference.lookup.datastore_format import (
    SUFFIXES,
    TOKENS,
    Header,
    array_files,
    check_tokenizer,
    open_array,
    read_header,
)
from eagle_train.inference.lookup.suffix_array import SEPARATOR

_WIDTH = TOKENS.itemsize  # bytes of a token
_END = SEPARATOR.to_bytes(_WIDTH, "big")


@dataclass(frozen=True)
class Continuations:
    """A tree of what may follow. Node 0 is the root, which has no token; node i + 1 has tokens[i].

    `tokens`, `parents`, `frequencies` [N]: each node's token, its parent's number, and the share of the hits that
    begin with the tokens from the root to it. Nodes are listed level by level, siblings together, the most frequent
    first, so parents never decrease. `match`: the tokens of the text's end that were found, 0 for none.
    """

    tokens: list[int]
    parents: list[int]
    frequencies: list[float]
    match: int


_NOTHING = Continuations([], [], [], 0)


class Datastore:
    """An index of texts that `eagle-datastore` wrote. Knows nothing of where they came from."""

    def __init__(self, folder: Path, header: Header, shards: list["_Shard"]):
        self.folder, self.header, self._shards = folder, header, shards

    @classmethod
    def open(
        cls, path: str | Path, vocabulary: Mapping[str, int] | None = None, field: str = "datastore"
    ) -> "Datastore":
        """Map an index into memory. `vocabulary`: the ids of the tokens that will be looked up, by token, or None to
        trust the caller. `field`: the setting that named the path.

        Raises UserError for what is no whole index of this version, or was made for another vocabulary.
        """
        folder = Path(path)
        header, place = read_header(folder, field), f"{field}={folder}"
        if vocabulary is not None:
            check_tokenizer(folder, header, vocabulary, place)
        shards = [_Shard(folder, number, header, place) for number in range(len(header.shards))]
        return cls(folder, header, shards)

    def continuations(
        self,
        context: Sequence[int],
        max_match: int = 16,
        least_match: int = 2,
        max_hits: int = 64,
        depth: int = 10,
        max_nodes: int = 32,
    ) -> Continuations:
        """What follows where the datastore holds the longest end of `context`, of `least_match` to `max_match` tokens.

        Of the hits `max_hits` are read, at equal distances in the order of suffixes, up to `depth` tokens each and
        never beyond a document. The tree has the `max_nodes` most frequent beginnings; of equally frequent ones the
        shorter, then the one of lower tokens. `max_match` must not exceed the header's `order`.
        """
        assert 1 <= least_match <= max_match <= self.header.order
        end = b"".join(token.to_bytes(_WIDTH, "big") for token in context[-max_match:])
        match, ranges = self._longest(end, least_match)
        if not match:
            return _NOTHING
        return _tree(self._read(ranges, match, max_hits, depth), max_nodes, match)

    def _longest(self, end: bytes, least: int) -> tuple[int, list[tuple["_Shard", int, int]]]:
        """The tokens of the longest end of `end` that a shard holds, and where all that hold it have it in their order;
        (0, []) if none of at least `least` tokens is there."""
        match, found = 0, list[_Shard]()
        for shard in self._shards:
            longest = shard.longest(end, max(match, least))
            if longest > match:
                match, found = longest, []
            if longest:
                found.append(shard)
        pattern = end[len(end) - match * _WIDTH :]
        return match, [(shard, *shard.range_of(pattern)) for shard in found]

    def _read(self, ranges: list[tuple["_Shard", int, int]], match: int, max_hits: int, depth: int) -> dict[bytes, int]:
        """How often each continuation is among the hits that are read, as the bytes of its tokens."""
        total = sum(last - first for _, first, last in ranges)
        wanted = min(total, max_hits)
        found: dict[bytes, int] = {}
        hit, before = 0, 0
        for shard, first, last in ranges:
            size = last - first
            while hit < wanted and (place := (2 * hit + 1) * total // (2 * wanted)) < before + size:
                tokens = shard.after(first + place - before, match, depth)
                found[tokens] = found.get(tokens, 0) + 1
                hit += 1
            before += size
        return found


class _Shard:
    """A shard's tokens as bytes and its suffixes as whole numbers: Python reads these fastest one at a time."""

    def __init__(self, folder: Path, number: int, header: Header, place: str):
        told = header.shards[number]
        tokens, suffixes = array_files(folder, number)
        self._first = open_array(tokens, TOKENS, told.tokens, place).offset
        with tokens.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = self._first + told.tokens * _WIDTH
        check(len(self._bytes) >= size, f"{place}: {tokens.name} is cut short; build it again")
        self._suffixes = open_array(suffixes, SUFFIXES, told.suffixes, place).data

    def longest(self, end: bytes, least: int) -> int:
        """The tokens of the longest end of `end` that is here, 0 if that has fewer than `least`.

        Each end of what is here is here too, so lengths are searched by halves.
        """
        most = len(end) // _WIDTH
        if most < least or not self._holds(end, least):
            return 0
        while least < most:
            middle = (least + most + 1) // 2
            if self._holds(end, middle):
                least = middle
            else:
                most = middle - 1
        return least

    def _holds(self, end: bytes, length: int) -> bool:
        pattern = end[len(end) - length * _WIDTH :]
        beginning = self._beginning(len(pattern))
        at = bisect_left(self._suffixes, pattern, key=beginning)
        return at < len(self._suffixes) and beginning(self._suffixes[at]) == pattern

    def range_of(self, pattern: bytes) -> tuple[int, int]:
        """Where the suffixes that begin with `pattern` lie in the order: [first, last)."""
        beginning = self._beginning(len(pattern))
        first = bisect_left(self._suffixes, pattern, key=beginning)
        return first, bisect_right(self._suffixes, pattern, lo=first, key=beginning)

    def after(self, place: int, match: int, depth: int) -> bytes:
        """The tokens behind the first `match` of the suffix at a place in the order, up to the document's end."""
        start = self._first + (self._suffixes[place] + match) * _WIDTH
        found = self._bytes[start : start + depth * _WIDTH]
        end = found.find(_END)  # it may begin within a token: the last bytes of one can be like a separator's
        return found if end < 0 else found[: -(-end // _WIDTH) * _WIDTH]

    def _beginning(self, size: int) -> Callable[[int], bytes]:
        """The first `size` bytes of a suffix, by its position."""
        tokens, first = self._bytes, self._first

        def read(position: int) -> bytes:
            start = first + position * _WIDTH
            return tokens[start : start + size]

        return read


def _tree(found: Mapping[bytes, int], max_nodes: int, match: int) -> Continuations:
    """The tree of the most frequent beginnings. `found`: how often there is each continuation.

    No beginning is more frequent than a shorter one of its own, so whatever is chosen has its parent before it.
    """
    counts = _beginnings(found, max_nodes)
    chosen = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:max_nodes]
    children: dict[bytes, list[bytes]] = {}
    for path in chosen:
        children.setdefault(path[:-_WIDTH], []).append(path)
    nodes, parents, hits = [b""], list[int](), sum(found.values())
    for number, path in enumerate(nodes):  # which grows meanwhile: level by level
        below = children.get(path, [])
        nodes += below
        parents += [number] * len(below)
    tokens = [int.from_bytes(path[-_WIDTH:], "big") for path in nodes[1:]]
    return Continuations(tokens, parents, [counts[path] / hits for path in nodes[1:]], match)


def _beginnings(found: Mapping[bytes, int], max_nodes: int) -> dict[bytes, int]:
    """How often there is each beginning, the `max_nodes` most frequent among them.

    Level by level: below a beginning that is no more frequent than `max_nodes` others of its level or above, none can
    be among these.
    """
    counts: dict[bytes, int] = {}
    end, alive = _WIDTH, list(found.items())
    while alive := [pair for pair in alive if len(pair[0]) >= end]:
        level: dict[bytes, int] = {}
        for tokens, times in alive:
            path = tokens[:end]
            level[path] = level.get(path, 0) + times
        counts |= level
        if len(counts) >= max_nodes:
            least = sorted(counts.values())[-max_nodes]
            alive = [pair for pair in alive if level[pair[0][:end]] > least]
        end += _WIDTH
    return counts
