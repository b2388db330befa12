"""How a datastore lies on disk: a directory with a header, the vocabulary, and two arrays for each shard.

- `datastore.json`: the header, see `Header`
- `vocabulary.json`: the tokenizer's tokens in the order of their ids, null for an id that has none
- `00000.tokens.npy`: a shard's documents, SEPARATOR behind each. uint32 in big-endian order, so that tokens compare as
  their bytes do
- `00000.suffixes.npy`: where its suffixes begin, in their order (`suffix_array.py`). uint32

So an index takes 8 bytes for each token. Both arrays are mapped into memory, never read whole.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eagle_train.errors import UserError, check, one_line, shown

VERSION = 1
HEADER, VOCABULARY = "datastore.json", "vocabulary.json"
TOKENS, SUFFIXES = np.dtype(">u4"), np.dtype("<u4")
TOKEN_BYTES = TOKENS.itemsize + SUFFIXES.itemsize  # on disk, for each token


@dataclass
class Shard:
    """A shard's counts, and the digests of its arrays. `tokens`: separators included."""

    tokens: int
    suffixes: int
    documents: int
    tokens_sha256: str
    suffixes_sha256: str


@dataclass
class Header:
    """`tokenizer`: a digest of the vocabulary; `vocabulary`: the number of its ids. `order`: the tokens by which
    suffixes are ordered. `made_of`: whatever the maker says of the texts."""

    tokenizer: str
    vocabulary: int
    order: int
    shards: list[Shard]
    made_of: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @property
    def tokens(self) -> int:
        """Separators left out."""
        return sum(shard.tokens - shard.documents for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.tokens, "documents": self.documents}


def array_files(folder: Path, number: int) -> tuple[Path, Path]:
    """The files of a shard's tokens and suffixes."""
    return folder / f"{number:05d}.tokens.npy", folder / f"{number:05d}.suffixes.npy"


def by_id(vocabulary: Mapping[str, int]) -> list[str | None]:
    """A tokenizer's tokens in the order of their ids, None for an id that has none. `vocabulary`: id by token."""
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        tokens[number] = token
    return tokens


def digest_of(vocabulary: Sequence[str | None]) -> str:
    """A digest of the tokens in the order of their ids."""
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def read_header(folder: Path, field_name: str) -> Header:
    """A datastore's header. Raises UserError, naming the field, where there is none of this version."""
    place = f"{field_name}={folder}"
    partial = folder.with_name(f"{folder.name}.partial")
    hint = f"; {partial} is not complete: the same eagle-datastore resumes it" if partial.is_dir() else ""
    check(folder.is_dir(), f"{place}: no such directory{hint or '; give what eagle-datastore wrote'}")
    check((folder / HEADER).is_file(), f"{place}: no {HEADER} there; give what eagle-datastore wrote")
    values = _read_json(folder / HEADER, place)
    version = values.get("version") if isinstance(values, dict) else None
    check(version == VERSION, f"{place}: has version {shown(version)}, and this reads {VERSION}; build it again")
    try:
        shards = [Shard(**shard) for shard in values["shards"]]
        known = {key: values[key] for key in ("tokenizer", "vocabulary", "order", "made_of")}
    except (KeyError, TypeError) as error:
        raise UserError(f"{place}: {HEADER} is no header: {one_line(error)}; build it again") from error
    return Header(shards=shards, **known)


def check_tokenizer(folder: Path, header: Header, vocabulary: Mapping[str, int], place: str) -> None:
    """Raise UserError, which begins with `place`, for a tokenizer whose tokens have other ids than the datastore's.

    `vocabulary`: id by token. The message names the first id that differs.
    """
    theirs = by_id(vocabulary)
    if digest_of(theirs) == header.tokenizer:
        return
    ours = _read_json(folder / VOCABULARY, place)
    both = zip(ours, theirs, strict=False)
    first = next((number for number, pair in enumerate(both) if pair[0] != pair[1]), min(len(ours), len(theirs)))
    mine, other = (_spelled(tokens, first) for tokens in (ours, theirs))
    raise UserError(
        f"{place}: was made for another tokenizer: token {first} is {mine} there, and {other} in the target's; "
        "build it for this target"
    )


def _spelled(tokens: Sequence[str | None], number: int) -> str:
    token = tokens[number] if number < len(tokens) else None
    return "none" if token is None else shown(token)


def open_array(file: Path, dtype: np.dtype, size: int, place: str) -> np.memmap:
    """A shard's array [size], mapped into memory. Raises UserError, which begins with `place`."""
    try:
        array = np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{place}: {file.name} cannot be read: {one_line(error)}; build it again") from error
    check(
        array.dtype == dtype and array.shape == (size,),
        f"{place}: {file.name} holds {array.dtype} {list(array.shape)}, not {dtype} [{size}]; build it again",
    )
    return array


def _read_json(file: Path, place: str) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{place}: {file.name} cannot be read: {one_line(error)}; build it again") from error
