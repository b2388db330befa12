"""A checkpoint's files: what they are called, what they hold, how they are written and read.

A checkpoint is the directory `DIR/step-00001234/` with
    draft.safetensors               the draft's tensors, whole (fp32 master weights)
    draft.json                      the draft's config
    optimizer-00001.safetensors     the optimiser's tensors: one file per rank, with its parts and their offsets
    trainer.pt                      the step, and everything else that a resumed run needs
    manifest.json                   size and sha256 of the files above
The manifest is written last. Knows nothing of models, optimisers or data: it keeps tensors and state dicts. Which
checkpoints a directory has, and when one is removed, is `store.py`'s. DESIGN sections 3.10 and 3.11.
"""

import functools
import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from eagle_train.distributed import ALONE, World
from eagle_train.ops.tensor_files import tensors_of, write_tensors
from eagle_train.ops.torch_private import dtensor_offset
from eagle_train.results import json_text

FORMAT = 3
MANIFEST = "manifest.json"
_DRAFT, _CONFIG, _TRAINER = "draft.safetensors", "draft.json", "trainer.pt"
_NAME = re.compile(r"step-(\d{8,})")
_OFFSETS = "DCP_SHARDING_INFO"  # the metadata key in which torch's reader looks for a part's offset in the whole tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: the draft's config and the trainer's state. Tensors are read on request."""

    path: Path
    step: int
    config: dict[str, Any]
    state: dict[str, Any]

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Load the checkpoint at `path` without verifying it; see `open_checkpoint` in verify.py."""
        trainer = torch.load(path / _TRAINER, map_location="cpu", weights_only=True)
        config = json.loads((path / _CONFIG).read_text("utf-8"))
        return cls(path, trainer["step"], config, trainer["state"])

    def draft(self) -> dict[str, Tensor]:
        """The draft's whole tensors, on the CPU, in the dtypes they were saved in (fp32)."""
        return tensors_of(self.path / _DRAFT)

    @property
    def names(self) -> set[str]:
        """The names of all tensors that `read_into` can fill."""
        return set(self._reader.read_metadata().state_dict_metadata)

    def read_into(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors of the draft and the optimiser, by name. Of a DTensor only this rank's part is read."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns a single process that it reads without a group
            dcp.load(tensors, storage_reader=self._reader)

    @cached_property
    def _reader(self) -> HuggingFaceStorageReader:
        """torch's reader. Its metadata is cached: it would open the files of all ranks again at each `read_into`."""
        reader = HuggingFaceStorageReader(str(self.path))
        reader.read_metadata = functools.cache(reader.read_metadata)  # type: ignore[method-assign]
        return reader


@dataclass(frozen=True)
class RankTensors:
    """The tensors that one rank writes, copied to the CPU so that training can go on.

    `draft`: whole tensors on the main rank, empty on the others. `optimizer`: this rank's parts; `offsets` has each
    part's offset in the whole tensor, one number per dimension.
    """

    draft: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    offsets: dict[str, list[int]]

    @classmethod
    def copied(
        cls, draft: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], world: World = ALONE
    ) -> "RankTensors":
        """Copies of this rank's tensors. A collective call where tensors are sharded.

        A DTensor is saved as it is sharded; of a part that several ranks have, each of them saves some tensors'. Of
        tensors that every rank has whole, rank r saves every size-th. The mappings may gather a tensor when it is
        looked up, so tensors are looked up one by one and released at once.
        """
        whole_draft = {}
        for name in draft:
            tensor = draft[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if world.is_main:
                whole_draft[name] = _copied(whole)
            del tensor, whole  # before the next one is gathered
        parts, offsets = {}, {}
        for number, name in enumerate(optimizer):
            tensor = optimizer[name]
            if isinstance(tensor, DTensor):
                copy, copies = _copy_of(tensor)
                if tensor.to_local().numel() and number % copies == copy:
                    parts[name], offsets[name] = _copied(tensor.to_local()), dtensor_offset(tensor)
            elif number % world.size == world.rank:
                parts[name], offsets[name] = _copied(tensor), [0] * tensor.ndim
            del tensor
        return cls(whole_draft, parts, offsets)


def _copy_of(tensor: DTensor) -> tuple[int, int]:
    """Which copy of its part of a divided tensor a rank has, counted from 0, and how many there are."""
    place, copy, copies = tensor.device_mesh.get_coordinate(), 0, 1
    assert place is not None, "each rank is in the mesh"
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copy, copies = copy * tensor.device_mesh.size(dim) + place[dim], copies * tensor.device_mesh.size(dim)
    return copy, copies


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares no memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def directory_name(step: int) -> str:
    """The name of the directory of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its directory's name."""
    return int(path.name.removeprefix("step-"))


def newest_config(directory: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint in a run's directory that has the draft's config, verified or not, and this; else None."""
    for path in reversed(checkpoints(directory)):
        with suppress(OSError, ValueError):  # a torn checkpoint, which `CheckpointStore.latest` tells of
            return path, json.loads((path / _CONFIG).read_text("utf-8"))
    return None


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoints in a run's directory by ascending step, verified or not."""
    return sorted((path for path in directory.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def write_rank_files(
    directory: Path, step: int, tensors: RankTensors, config: dict[str, Any], state: dict[str, Any], rank: int
) -> dict[str, Any]:
    """Write a rank's files and flush them to the disk. Returns their fingerprints by file name.

    Rank 0 writes the draft, its config and the trainer's state beside its part of the optimiser's.
    """
    shard = directory / f"optimizer-{rank + 1:05d}.safetensors"
    offsets = {name: {"saved_offsets": offset} for name, offset in tensors.offsets.items()}
    write_tensors(tensors.optimizer, shard, {"format": "pt", _OFFSETS: json.dumps(offsets)})
    written = [shard]
    if rank == 0:
        write_tensors(tensors.draft, directory / _DRAFT, {"format": "pt"})
        (directory / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        _write_trainer(directory / _TRAINER, {"step": step, "state": state})
        written += [directory / _DRAFT, directory / _CONFIG, directory / _TRAINER]
    for path in written:
        flush(path)
    return {path.name: fingerprint(path) for path in written}


def _write_trainer(path: Path, content: dict[str, Any]) -> None:
    """Write trainer.pt. Raises where the content could not be read back with `weights_only=True`."""
    # Through a Python file: torch's own writer does not report why a write failed.
    with path.open("wb") as file:
        torch.save(content, file)
    # Such a state must fail now and not when a run is resumed. mmap leaves the tensors unread.
    torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def write_manifest(directory: Path, values: dict[str, Any]) -> None:
    """Write the last file; the checkpoint is then complete."""
    (directory / MANIFEST).write_text(json_text({"format": FORMAT, **values}, indent=2) + "\n", "utf-8")
    for path in (directory / MANIFEST, directory):
        flush(path)


def read_manifest(path: Path) -> Any:
    """The manifest of the checkpoint at `path`. Raises OSError or ValueError where there is none or it is no JSON."""
    return json.loads((path / MANIFEST).read_bytes())


def score_of(path: Path) -> float | None:
    """The held-out score of the checkpoint at `path`. None without one, or where the manifest cannot be read."""
    try:
        return read_manifest(path)["score"]
    except (OSError, ValueError, KeyError):
        return None


def fingerprint(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its sha256, as the manifest keeps them."""
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def flush(path: Path) -> None:
    """Wait until a file's contents, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
