"""A datastore that is built shard by shard, appears whole, and is resumed after a kill.

Shards are written into OUT.partial, which is made with the first one and becomes OUT at the end. `progress.json` there
has what the index is made of, the finished shards, and where the texts of the next one begin. Memory holds one shard.
Knows nothing of texts.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eagle_train.errors import UserError, check, one_line
from eagle_train.inference.lookup.datastore_format import (
    HEADER,
    SUFFIXES,
    TOKEN_BYTES,
    TOKENS,
    VOCABULARY,
    Header,
    Shard,
    array_files,
    by_id,
    digest_of,
)
from eagle_train.inference.lookup.suffix_array import (
    MOST_TOKENS,
    ORDER,
    SEPARATOR,
    TOKEN_LIMIT,
    sorted_suffixes,
)
from eagle_train.results import write_json

_LOG = logging.getLogger(__name__)
_PROGRESS = "progress.json"


def partial_of(out: Path) -> Path:
    """Where an index lies that is not complete."""
    return out.with_name(f"{out.name}.partial")


def made_of_earlier(out: Path) -> dict[str, Any] | None:
    """What the index is made of that was begun at `out`; None where none was."""
    file = partial_of(out) / _PROGRESS
    return json.loads(file.read_text("utf-8"))["made_of"] if file.is_file() else None


class DatastoreWriter:
    """Writes the index at `out`, or goes on with one that was begun there.

    `made_of`: all that the index depends on, as JSON has it; an index that was begun with other values is refused.
    `vocabulary`: id by token. `shard_tokens`: a shard ends with the first text that fills it. `place`: where the next
    text begins, whatever that is for the caller; `start` for the first. `tokens`, `documents`: of all shards so far.

    Raises UserError, naming the field `out`, for an index that is there already, and where nothing can be written.
    """

    def __init__(
        self, out: Path, made_of: dict[str, Any], vocabulary: Mapping[str, int], shard_tokens: int, start: Any
    ):
        self.out, self.partial, self.made_of = out, partial_of(out), made_of
        self.tokens_by_id, self.shard_tokens = by_id(vocabulary), min(shard_tokens, MOST_TOKENS // 2)
        self.place, self.shards = start, list[Shard]()
        self._places: list[Any] = []  # behind each shard
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0  # separators included
        check(not out.exists(), f"out={out}: exists; give another directory, or remove it")
        if (self.partial / _PROGRESS).is_file():
            self._resume()
        else:
            there = self.partial.exists() and any(self.partial.iterdir())
            check(not there, f"out={out}: {self.partial} is there, and no build began it; remove it")

    @property
    def tokens(self) -> int:
        return sum(shard.tokens - shard.documents for shard in self.shards) + self._pending_tokens - len(self._pending)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards) + len(self._pending)

    @property
    def disk_bytes(self) -> int:
        """What the finished shards take."""
        return sum(shard.tokens + shard.suffixes for shard in self.shards) * (TOKEN_BYTES // 2)

    def add(self, tokens: np.ndarray) -> None:
        """Add a document, integers [n] below TOKEN_LIMIT; an empty one is left out."""
        assert tokens.max(initial=0) < TOKEN_LIMIT
        if tokens.size:
            self._pending.append(np.append(tokens.astype(np.uint32), np.uint32(SEPARATOR)))
            self._pending_tokens += tokens.size + 1

    def reached(self, place: Any) -> None:
        """Say where the text behind the documents so far begins; a shard that is full is written."""
        self.place = place
        if self._pending_tokens >= self.shard_tokens:
            self._finish_shard()

    def close(self) -> Header:
        """Write what is left, and let the index appear at `out`. Raises UserError for an index without a document."""
        if self._pending:
            self._finish_shard()
        check(bool(self.shards), f"out={self.out}: the data hold no token, so there is nothing to index")
        digest = digest_of(self.tokens_by_id)
        header = Header(digest, len(self.tokens_by_id), ORDER, self.shards, self.made_of)
        write_json(self.partial / VOCABULARY, self.tokens_by_id)
        write_json(self.partial / HEADER, header.as_json())
        with _writing(self.out):
            os.rename(self.partial, self.out)
            (self.out / _PROGRESS).unlink()
        return header

    def _resume(self) -> None:
        earlier = json.loads((self.partial / _PROGRESS).read_text("utf-8"))
        for key, value in json.loads(json.dumps(self.made_of)).items():
            known = earlier["made_of"].get(key)
            problem = f"out={self.out}: was begun with {key}={known}, not {value}"
            check(known == value, f"{problem}; give another directory, or remove {self.partial}")
        for number, (shard, place) in enumerate(earlier["shards"]):
            if not self._is_sound(number, known := Shard(**shard)):
                _LOG.warning("%s: shard %d is damaged: it is built again, and those behind it", self.partial, number)
                break
            self.shards.append(known)
            self._places.append(place)
            self.place = place
        _LOG.info("%s: goes on after %d finished shards", self.partial, len(self.shards))

    def _is_sound(self, number: int, shard: Shard) -> bool:
        """Whether a shard's arrays are what was written."""
        digests = (shard.tokens_sha256, shard.suffixes_sha256)
        files = array_files(self.partial, number)
        return all(_digest_in(file) == digest for file, digest in zip(files, digests, strict=True))

    def _finish_shard(self) -> None:
        """Sort and write the documents so far. Files of a shard that is not in progress.json yet are written over."""
        documents, tokens = len(self._pending), np.concatenate(self._pending)
        self._pending, self._pending_tokens = [], 0
        arrays = (tokens.astype(TOKENS), sorted_suffixes(tokens).astype(SUFFIXES))
        with _writing(self.out):
            self.partial.mkdir(parents=True, exist_ok=True)
            if not self.shards:
                self._note_progress()  # so that what a kill leaves is known for a build's
            for file, array in zip(array_files(self.partial, len(self.shards)), arrays, strict=True):
                _save(file, array)
        self.shards.append(Shard(tokens.size, arrays[1].size, documents, *map(_digest, arrays)))
        self._places.append(self.place)
        self._note_progress()

    def _note_progress(self) -> None:
        shards = [[asdict(shard), place] for shard, place in zip(self.shards, self._places, strict=True)]
        write_json(self.partial / _PROGRESS, {"made_of": self.made_of, "shards": shards})


def _save(file: Path, array: np.ndarray) -> None:
    """As `np.save`, which does not notice every error of a full disk: it writes past Python's file."""
    with file.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        stream.write(array.data)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.view(np.uint8).data).hexdigest()


def _digest_in(file: Path) -> str | None:
    """The digest of the array in a file; None where no array can be read."""
    try:
        return _digest(np.load(file, mmap_mode="r"))
    except (OSError, ValueError, EOFError):
        return None


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Raises UserError where nothing can be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"out={out}: cannot be written: {one_line(error)}; the same command resumes") from error
