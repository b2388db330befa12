"""The shards that one rank writes: each appears whole, by a rename, when it is full. Knows nothing of data."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from eagle_train.drafts import TargetStates
from eagle_train.errors import UserError, one_line
from eagle_train.models.state_files import (
    HIDDEN,
    HIDDEN_SCALES,
    LAYER_SCALES,
    LAYERS,
    STATES,
    Layout,
    checksum_of,
    encoded,
)
from eagle_train.ops.tensor_files import write_tensors
from eagle_train.training.checkpoint.format import flush

Parts = dict[str, np.ndarray]
"""States as bytes by part, uint8 [..., width]."""


class ShardWriter:
    """Writes documents into shards of about `shard_bytes`, after the first `number` of this rank, which are there.

    Raises UserError, naming the field `out`, where nothing can be written.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        number: int,
        layout: Layout,
        supervised_only: bool,
        shard_bytes: int,
        out: Path,
    ):
        self._folder, self._rank, self._layout, self._out = folder, rank, layout, out
        self._supervised_only, self._shard_bytes = supervised_only, shard_bytes
        self._number = number
        self._pending: list[tuple[bytes, torch.Tensor, torch.Tensor, Parts]] = []
        self._pending_bytes = 0
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    @property
    def names(self) -> list[str]:
        """The names of this rank's shards, those that were there and those that are written or being written."""
        return [shard_name(self._rank, number) for number in range(self._number)]

    def parts_of(self, states: TargetStates, layers: tuple[int, ...]) -> Parts:
        """A batch's states as they are kept, uint8 [B, T, width] by part, on the host."""
        of_hidden, hidden_scales = encoded(states.hidden, self._layout)
        tensors = {HIDDEN: of_hidden, HIDDEN_SCALES: None if hidden_scales is None else hidden_scales.unsqueeze(-1)}
        if layers:
            of_layers, scales = encoded(torch.stack([states.layers[each] for each in layers], dim=2), self._layout)
            tensors |= {LAYERS: of_layers.flatten(2), LAYER_SCALES: scales}
        there = {name: each.contiguous() for name, each in tensors.items() if each is not None}
        return {name: each.view(torch.uint8).cpu().numpy() for name, each in there.items()}

    def add(self, key: bytes, tokens: torch.Tensor, supervised: torch.Tensor, parts: Parts) -> None:
        """Add a document: tokens int64 [n], supervised bool [n], its states uint8 [n, width] by part."""
        if self._supervised_only:
            wanted = supervised.numpy()
            parts = {name: each[wanted] if name in (HIDDEN, HIDDEN_SCALES) else each for name, each in parts.items()}
        parts = {name: each.copy() for name, each in parts.items()}  # not the whole batch
        self._pending.append((key, tokens, supervised, parts))
        self._pending_bytes += sum(each.nbytes for each in parts.values())

    def reached(self) -> None:
        """Called after each batch: a shard that is full is written meanwhile."""
        if self._pending_bytes >= self._shard_bytes:
            self._begin()

    def close(self) -> None:
        """Write what is left."""
        if self._pending:
            self._begin()
        self._wait()
        self._pool.shutdown()

    def _begin(self) -> None:
        self._wait()
        pending, number = self._pending, self._number
        self._pending, self._pending_bytes, self._number = [], 0, number + 1
        self._writing = self._pool.submit(self._write, pending, number)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _write(self, pending: list[tuple[bytes, torch.Tensor, torch.Tensor, Parts]], number: int) -> None:
        keys, tokens, supervised, parts = zip(*pending, strict=True)
        lengths = torch.tensor([len(each) for each in tokens], dtype=torch.int32)
        wanted = torch.cat(supervised)
        tensors = {
            "keys": torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8).view(len(keys), -1),
            "lengths": lengths,
            "kept": torch.tensor([len(each[HIDDEN]) for each in parts], dtype=torch.int32),
            "checksums": torch.tensor([checksum_of(each) for each in parts]),
            "tokens": torch.cat(tokens).to(torch.int32),
            **self._states(parts),
        }
        if self._supervised_only:
            tensors["wanted"] = wanted.to(torch.uint8)
        path = self._folder / shard_name(self._rank, number)
        hidden = path.with_name(f".{path.name}.partial")
        with writing(self._out):
            write_tensors(tensors, hidden)
            flush(hidden)
            os.replace(hidden, path)
            flush(self._folder)

    def _states(self, parts: tuple[Parts, ...]) -> dict[str, torch.Tensor]:
        """The states of all documents, with their types and shapes."""
        found = {}
        for name in STATES:
            if name in parts[0]:
                whole = torch.from_numpy(np.concatenate([each[name] for each in parts]))
                typed = whole.view(torch.float32 if name in (HIDDEN_SCALES, LAYER_SCALES) else self._layout.stored)
                found[name] = typed.unflatten(-1, (self._layout.layers, -1)) if name == LAYERS else typed
        if HIDDEN_SCALES in found:
            found[HIDDEN_SCALES] = found[HIDDEN_SCALES].squeeze(-1)
        return found


def shard_name(rank: int, number: int) -> str:
    return f"{rank:04d}-{number:05d}.safetensors"


def rank_of(shard: str) -> int:
    """The rank that writes the shard of this name."""
    return int(shard.partition("-")[0])


def shards_of(folder: Path) -> list[str]:
    """The names of all shards that are there, in order."""
    return sorted(path.name for path in folder.glob(f"{'[0-9]' * 4}-{'[0-9]' * 5}.safetensors"))


def document_parts(parts: Mapping[str, np.ndarray], row: int, start: int, end: int) -> Parts:
    """Of a batch's states those of one document."""
    return {name: each[row, start:end] for name, each in parts.items()}


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Raises UserError where nothing can be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"out={out}: cannot be written: {one_line(error)}; the same command goes on") from error
