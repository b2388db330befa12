"""A target's hidden states on disk: how a cache lies there, and reading of it. DESIGN section 3.4.

- `cache.json`: the header, see `Header`
- `R-NNNNN.safetensors`: shards, whole documents one behind the other, of rank R; see `Shard`
- `index.safetensors`: where each document's states begin, by its key in ascending order
- `ends.safetensors` and the target's small files: see cached_target.py

States are kept by document. A causal target's follow from the tokens alone, so a document is found by a hash of them.
Files are mapped into memory, never read whole. Knows nothing of texts, rows of data or drafts.

Shapes: D documents, N tokens of them together, K of these whose final hidden state is kept, L layers, H hidden; n, k of
one document.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from eagle_train.errors import UserError, check, foreign, one_line, shown
from eagle_train.ops.tensor_files import tensors_of

VERSION = 1
HEADER, INDEX = "cache.json", "index.safetensors"
PRECISIONS = ("target", "bf16", "fp8")
KEY_BYTES = 16
HIDDEN, LAYERS, HIDDEN_SCALES, LAYER_SCALES = "hidden", "layers", "hidden_scales", "layer_scales"
STATES = (HIDDEN, LAYERS, HIDDEN_SCALES, LAYER_SCALES)  # the parts of a document's states, in the checksum's order
_FP8_MOST = torch.finfo(torch.float8_e4m3fn).max
_LEAST = torch.finfo(torch.float32).tiny
_OPEN = 256  # shards that are mapped at once: each holds a file's number


@dataclass
class Header:
    """What a cache holds, and of what.

    `target`: the identity of the target (`Identity`). `dtype`: in which it computed, `precision`: in which its states
    are kept. `supervised_only`: the final hidden state is kept only where a supervised slot's loss reads it. `layers`:
    those whose outputs are kept, ascending. `target_quant`: `train.target_quant` of the run that it is for.
    `embedding_scale`: `Target.embedding_scale`. `scale`, `softcap`: of the LM head. `rows`: how many packed rows of the
    run's data it holds the documents of, the first ones; None for all of the data. `made_of`: all settings that its
    contents depend on.
    """

    target: dict[str, Any]
    dtype: str
    precision: str
    supervised_only: bool
    layers: list[int]
    target_quant: str
    embedding_scale: float
    scale: float
    softcap: float | None
    documents: int
    tokens: int
    shards: list[str]
    rows: int | None = None
    made_of: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @property
    def computed(self) -> torch.dtype:
        """The dtype in which the target computed, and what is read is given."""
        return getattr(torch, self.dtype)

    @property
    def layout(self) -> "Layout":
        return Layout(self.target["hidden_size"], len(self.layers), self.precision, self.computed)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Layout:
    """How a token's states lie in a shard: `hidden` numbers of the final state, and as many of each of `layers`."""

    hidden: int
    layers: int
    precision: str
    computed: torch.dtype

    @property
    def stored(self) -> torch.dtype:
        return {"target": self.computed, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[self.precision]

    @property
    def widths(self) -> dict[str, int]:
        """Bytes of a token in each part of its states, 0 where there is none."""
        state, scale = self.hidden * self.stored.itemsize, 4 if self.precision == "fp8" else 0
        parts = (state, self.layers * state, scale, self.layers * scale)
        return dict(zip(STATES, parts, strict=True))

    def document_bytes(self, tokens: int, kept: int, supervised_only: bool) -> int:
        """Bytes that a document takes in a shard and in the index. `kept`: its final hidden states that are kept."""
        widths = self.widths
        states = kept * (widths[HIDDEN] + widths[HIDDEN_SCALES]) + tokens * (widths[LAYERS] + widths[LAYER_SCALES])
        own = KEY_BYTES + 2 * 4 + 8  # key, two lengths and the checksum
        return states + tokens * (4 + supervised_only) + own + KEY_BYTES + 3 * 4 + 3 * 8


class Place(NamedTuple):
    """Where a document lies: the shard's number, the rows of its first token and of its first final state there, how
    many tokens and final states it has, and its checksum."""

    shard: int
    first: int
    first_kept: int
    tokens: int
    kept: int
    checksum: int


def key_of(tokens: torch.Tensor, supervised: torch.Tensor | None = None) -> bytes:
    """The key of a document, KEY_BYTES long: blake2b of its tokens, integers [n], and of which are `supervised`, bool
    [n], where final hidden states are kept of these alone."""
    digest = hashlib.blake2b(tokens.numpy().astype("<i4").tobytes(), digest_size=KEY_BYTES)
    if supervised is not None:
        digest.update(np.packbits(supervised.numpy()).tobytes())
    return digest.digest()


def checksum_of(parts: Mapping[str, np.ndarray]) -> int:
    """The sum of 64-bit words of a document's parts, uint8 [rows, width] each, as an int64. Any byte changes it."""
    total = 0
    for name in STATES:
        if name in parts:
            content = np.ascontiguousarray(parts[name]).reshape(-1)
            whole = content.size // 8 * 8
            total += int(content[:whole].view("<u8").sum(dtype=np.uint64))
            total += int.from_bytes(content[whole:].tobytes(), "little")
    return (total + 2**63) % 2**64 - 2**63


def encoded(states: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States [..., H] in the dtype in which they are kept, and with fp8 their scales, fp32 [...]: one for each token
    and layer."""
    if layout.precision != "fp8":
        return states.to(layout.stored), None
    wide = states.float()
    scales = (wide.abs().amax(-1) / _FP8_MOST).clamp_min(_LEAST)
    return (wide / scales.unsqueeze(-1)).to(layout.stored), scales


def decoded(stored: torch.Tensor, scales: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """The inverse of `encoded`, in the dtype in which the target computed; of fp8 up to rounding."""
    if scales is None:
        return stored.to(layout.computed)
    return (stored.float() * scales.unsqueeze(-1)).to(layout.computed)


def read_header(folder: Path, place: str) -> Header:
    """A cache's header. Raises UserError, which begins with `place`, where there is none of this version."""
    partial = partial_of(folder)
    hint = f"; {partial} is not complete: the same eagle-cache goes on with it" if partial.is_dir() else ""
    there = (folder / HEADER).is_file()
    check(there, f"{place}: no {HEADER} there{hint or '; give a directory that eagle-cache wrote'}")
    try:
        values = json.loads((folder / HEADER).read_text("utf-8"))
        version = values["version"]
        check(version == VERSION, f"{place}: has version {shown(version)}, and this reads {VERSION}; write it again")
        return Header(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{place}: {HEADER} is no header: {one_line(error)}; write the cache again") from error


def partial_of(out: Path) -> Path:
    """Where a cache lies that is not complete."""
    return out.with_name(f"{out.name}.partial")


class Shard:
    """A shard's tensors, mapped into memory; documents one behind the other in each.

    keys uint8 [D, 16]; lengths, kept int32 [D]; checksums int64 [D]; tokens int32 [N]; wanted uint8 [N], with
    `supervised_only`: which tokens' final state is kept; hidden [K, H]; layers [N, L, H]; with fp8, hidden_scales fp32
    [K] and layer_scales fp32 [N, L].
    """

    def __init__(self, path: Path, place: str):
        """Raises UserError, which begins with `place`, for a file that is damaged."""
        with foreign(f"{place}: {path.name} cannot be read; write the cache again"):
            content = np.memmap(path, dtype=np.uint8, mode="r")
            begin = 8 + int(content[:8].view("<u8")[0])
            header = json.loads(content[8:begin].tobytes())
            self._parts = {
                name: (each["shape"], content[begin + each["data_offsets"][0] : begin + each["data_offsets"][1]])
                for name, each in header.items()
                if name != "__metadata__"
            }
            for shape, part in self._parts.values():
                part.reshape(shape[0], -1)  # raises where the file ends early

    def array(self, name: str, dtype: str) -> np.ndarray:
        """One of the small tensors; empty where there is none."""
        shape, content = self._parts.get(name, ([0], np.zeros(0, np.uint8)))
        return content.view(dtype).reshape(shape)

    def states(self, place: Place) -> dict[str, np.ndarray]:
        """The parts of a document's states as bytes, uint8 [rows, width]; views."""
        rows = {
            HIDDEN: slice(place.first_kept, place.first_kept + place.kept),
            LAYERS: slice(place.first, place.first + place.tokens),
        }
        rows |= {HIDDEN_SCALES: rows[HIDDEN], LAYER_SCALES: rows[LAYERS]}
        found = {}
        for name in STATES:
            if name in self._parts:
                shape, content = self._parts[name]
                found[name] = content.reshape(shape[0], -1)[rows[name]] if shape[0] else content.reshape(0, 1)
        return found

    def columns(self, number: int) -> dict[str, np.ndarray]:
        """Where its documents lie, in their order: a column [D] for each field of `Place`. `number`: the shard's."""
        lengths, kept = (self.array(name, "<i4").astype(np.int64) for name in ("lengths", "kept"))
        sums = self.array("checksums", "<i8")
        columns = (
            np.full(len(sums), number),
            np.cumsum(lengths) - lengths,
            np.cumsum(kept) - kept,
            lengths,
            kept,
            sums,
        )
        return dict(zip(Place._fields, columns, strict=True))

    def places(self, number: int) -> list[Place]:
        """The same, document by document."""
        return [Place(*row) for row in zip(*(each.tolist() for each in self.columns(number).values()), strict=True)]


class StateFiles:
    """The states of a complete cache, by document. Threads may read at once.

    Raises UserError, which begins with `place`, for files that are missing or damaged.
    """

    def __init__(self, folder: Path, header: Header, place: str):
        self.folder, self.header, self.place = folder, header, place
        with foreign(f"{place}: {INDEX} cannot be read; write the cache again"):
            index = tensors_of(folder / INDEX)
            self._heads, self._tails = index["keys"].numpy().view(">u8").T
            self._columns = [index[name].numpy() for name in Place._fields]
        self._shard = lru_cache(maxsize=_OPEN)(lambda number: Shard(folder / header.shards[number], place))

    def find(self, key: bytes) -> Place | None:
        """Where the document with this key lies; None where it is not there."""
        head, tail = np.frombuffer(key, ">u8").tolist()
        row = int(np.searchsorted(self._heads, np.uint64(head)))
        while row < len(self._heads) and int(self._heads[row]) == head:
            if int(self._tails[row]) == tail:
                return Place(*(int(column[row]) for column in self._columns))
            row += 1
        return None

    def read(self, place: Place) -> dict[str, np.ndarray]:
        """A document's states as bytes, uint8 [rows, width]. Raises UserError where they are not what was written."""
        states = self._shard(place.shard).states(place)
        name = self.header.shards[place.shard]
        check(
            checksum_of(states) == place.checksum,
            f"{self.place}: {name} is damaged: states of a document of {place.tokens} tokens are not what was "
            "written; remove the cache and write it again",
        )
        return states


def index_of(shards: Sequence[Shard]) -> dict[str, torch.Tensor]:
    """The tensors of `index.safetensors`, documents in their keys' order."""
    keys = np.concatenate([each.array("keys", "u1") for each in shards])
    heads, tails = keys.view(">u8").T
    order = np.lexsort((tails, heads))
    columns = [each.columns(number) for number, each in enumerate(shards)]
    tensors = {"keys": torch.from_numpy(keys[order])}
    for name in Place._fields:
        values = np.concatenate([each[name] for each in columns])[order]
        tensors[name] = torch.from_numpy(values.astype(np.int32 if name in ("shard", "tokens", "kept") else np.int64))
    return tensors
