"""Checkpoints: written whole or not at all, verified before they are used. DESIGN sections 3.10 and 3.11.

A checkpoint is the directory `DIR/step-00001234/` with
    draft.safetensors               the draft's tensors, whole (fp32 master weights)
    draft.json                      the draft's config
    optimizer-00001.safetensors     the optimiser's tensors; a file from each rank with its parts and where they belong
    trainer.pt                      the step and everything else that a resumed run needs
    manifest.json                   size and sha256 of the files above
Knows nothing of models, optimisers or data: it keeps tensors and state dicts.
"""

import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from eagle_train.distributed import ALONE, CommonError, World
from eagle_train.errors import check, one_line
from eagle_train.ops.torch_private import dtensor_offset
from eagle_train.results import json_text

FORMAT = 2
DRAFT, CONFIG, TRAINER, MANIFEST = "draft.safetensors", "draft.json", "trainer.pt", "manifest.json"
NAME = re.compile(r"step-(\d{8,})")
PLACES = "DCP_SHARDING_INFO"  # where torch's reader of sharded safetensors looks for a part's place in its whole

T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """The draft's config and the trainer's state; the tensors are read when they are asked for."""

    path: Path
    step: int
    config: dict[str, Any]
    state: dict[str, Any]

    def draft(self) -> dict[str, Tensor]:
        """The draft's tensors, whole, on the CPU, dtypes as saved."""
        return load_file(self.path / DRAFT)

    @property
    def names(self) -> set[str]:
        """Of all tensors that `read_into` can fill."""
        return set(self.reader.read_metadata().state_dict_metadata)

    def read_into(self, tensors: dict[str, Tensor]) -> None:
        """Fill tensors, of the draft and of the optimiser by name; of a DTensor only this rank's part is read."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that a process alone reads alone
            dcp.load(tensors, storage_reader=self.reader)

    @cached_property
    def reader(self) -> HuggingFaceStorageReader:
        """torch's reader, which else would look into every rank's file anew for each `read_into`."""
        reader = HuggingFaceStorageReader(str(self.path))
        reader.read_metadata = functools.cache(reader.read_metadata)
        return reader


@dataclass(frozen=True)
class Parts:
    """What one rank writes, copied to the CPU, so that training can go on: tensors, and each one's place in its whole.

    `draft` is whole, and empty on other ranks than the first.
    """

    draft: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    offsets: dict[str, list[int]]

    @classmethod
    def of(cls, draft: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], world: World = ALONE) -> "Parts":
        """This rank's parts. DTensors are divided as they are; of what every rank has whole, each takes every n-th.

        Tensors are asked for one by one, and let go of: what is gathered for it need not fit beside its parts.
        """
        kept = {}
        for name in draft:
            tensor = draft[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if world.is_main:
                kept[name] = copied(whole)
            del tensor, whole  # before the next is made
        parts, offsets = {}, {}
        for number, name in enumerate(optimizer):
            tensor = optimizer[name]
            if isinstance(tensor, DTensor):
                if tensor.to_local().numel():
                    parts[name], offsets[name] = copied(tensor.to_local()), dtensor_offset(tensor)
            elif number % world.size == world.rank:
                parts[name], offsets[name] = copied(tensor), [0] * tensor.ndim
            del tensor
        return cls(kept, parts, offsets)


def copied(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares no memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class Saver:
    """Saves in a thread, one checkpoint after the other, while training goes on."""

    def __init__(self, world: World):
        self.exchange, self.rank = functools.partial(world.exchange, side="files"), world.rank
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.running: Future[Path] | None = None

    def save(self, *arguments: Any, **options: Any) -> None:
        """`save`, when the one before is done. Raises what that one raised."""
        self.wait()
        self.running = self.pool.submit(save, *arguments, **options, exchange=self.exchange, rank=self.rank)

    def wait(self) -> Path | None:
        """The last checkpoint's directory, when it is whole. Raises what its saving raised."""
        running, self.running = self.running, None
        return running.result() if running else None


class DiskError(Exception):
    """The disk refused what a rank wanted to write."""


def together(exchange: Exchange, task: Callable[[], T]) -> list[T]:
    """What `task` returns on each rank. Raises DiskError on all of them where the disk refuses one of them."""
    own: tuple[T | None, str | None]
    try:
        own = task(), None
    except BaseException as error:
        reason = disk_error(error)
        if reason is None:
            raise
        own = None, one_line(reason)
    everyone = exchange(own)
    for _, reason in everyone:
        if reason is not None:
            raise DiskError(reason)
    return [value for value, _ in everyone]


def save(
    directory: Path | str,
    step: int,
    parts: Parts,
    config: dict[str, Any],
    state: dict[str, Any],
    keep: int,
    score: float | None = None,
    exchange: Exchange = ALONE.exchange,
    rank: int = 0,
) -> Path:
    """Write the checkpoint of `step` and remove old ones; returns its directory. Every rank calls it.

    config: JSON values. state: nested dicts, lists, tuples, numbers, strings and tensors, because it is read back with
    `weights_only=True`. Both are taken from the first rank. `keep` counts the checkpoints kept up to and including this
    step, the one of the highest `score` besides (0 keeps all); those of later steps, which another run left, are not
    touched. A checkpoint of the same step is replaced. `exchange` hands every rank what each gave. Raises UserError on
    every rank when the disk refuses one of them; earlier checkpoints are then as they were.
    """
    assert score is None or math.isfinite(score), score
    directory = Path(directory)
    final = directory / f"step-{step:08d}"
    partial = directory / f".{final.name}.partial"

    def begin() -> None:
        if rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            clean_up(directory)
            partial.mkdir()

    def finish() -> None:
        if rank == 0:
            write_manifest(partial, {"step": step, "score": score, "files": files})
            publish(partial, final)

    try:
        together(exchange, begin)
        written = together(exchange, lambda: write_files(partial, step, parts, config, state, rank))
        files = {name: seal for own in written for name, seal in own.items()}
        together(exchange, finish)
    except BaseException as error:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, DiskError):
            raise
        message = f"checkpoint directory {directory}: step {step} could not be written: {error}"
        raise CommonError(f"{message}; earlier checkpoints are untouched") from error
    if keep and rank == 0:
        prune(directory, step, keep)
    return final


def check_shared(directory: Path, exchange: Exchange, rank: int) -> None:
    """Raise CommonError unless every rank can write into the directory and sees what the others write. All call it.

    A directory that was not there is not there afterwards: the run may yet be refused.
    """
    is_new = not directory.exists()
    number = exchange(time.time_ns())[0]  # another each time: file systems remember what was not there
    mine = directory / f".seen-{number}-{rank}"

    def write() -> str:
        directory.mkdir(parents=True, exist_ok=True)
        mine.touch()
        return mine.name

    try:
        names = together(exchange, write)
        seen = exchange(all((directory / name).exists() for name in names))
    except DiskError as error:
        raise CommonError(f"out={directory}: cannot be written: {error}") from error
    finally:
        with suppress(OSError):  # what could not be written may not be there
            mine.unlink()
        if is_new:
            with suppress(OSError):  # another rank's file may still be there, and it will remove it
                directory.rmdir()
    if not all(seen):
        raise CommonError(
            f"out={directory}: rank {seen.index(False)} does not see there what others write: checkpoints "
            "are written by all, so give a directory that all nodes share"
        )


def prune(directory: Path, step: int, keep: int) -> None:
    """Remove the checkpoints up to `step` but the last `keep` and the best."""
    paths = [path for path in checkpoints(directory) if step_of(path) <= step]
    scores = {path: score for path in paths if (score := score_of(path)) is not None}
    best = max(scores, key=lambda path: (scores[path], step_of(path)), default=None)
    for path in paths[:-keep]:
        if path != best:
            discard(path)


def latest(directory: Path | str, exchange: Exchange = ALONE.exchange, rank: int = 0) -> Path | None:
    """The newest checkpoint that is whole; None if there is none. Every rank calls it and verifies some of the files.

    A damaged one is passed over with a line on stderr that says which and why. The files are read whole to verify them.
    Raises UserError where there are some and none is whole: a run that starts anew would write over what may be saved.
    """
    directory = Path(directory)
    if rank == 0:
        restore_replaced(directory)
    paths = exchange(checkpoints(directory) if rank == 0 else [])[0]
    flaws = []
    for path in reversed(paths):
        flaw = first_flaw(path, exchange, rank)
        if flaw is None:
            return path
        flaws.append(f"{path.name}: {flaw}")
        if rank == 0:
            print(f"warning: checkpoint {path} is passed over: {flaw}", file=sys.stderr)
    found = f"{directory} holds {len(paths)} checkpoints and none is whole"
    check(not paths, f"{found} ({'; '.join(flaws)}); remove them to start anew")
    return None


def load(path: Path | str, exchange: Exchange = ALONE.exchange, rank: int = 0) -> Checkpoint:
    """Open one checkpoint after verifying it. Raises UserError if it is missing or damaged."""
    path = Path(path)
    flaw = first_flaw(path, exchange, rank)
    check(flaw is None, f"checkpoint {path}: {flaw}; give a directory step-XXXXXXXX that `save` has finished")
    trainer = torch.load(path / TRAINER, map_location="cpu", weights_only=True)
    config = json.loads((path / CONFIG).read_text("utf-8"))
    return Checkpoint(path, trainer["step"], config, trainer["state"])


def random_state() -> dict[str, Any]:
    """State of Python's and torch's generators, the current CUDA device's included, as values that `save` can keep."""
    version, numbers, gauss = random.getstate()
    return {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Continue from `random_state()`'s result. CUDA's part is left out where either side has no CUDA device."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def write_files(
    partial: Path, step: int, parts: Parts, config: dict[str, Any], state: dict[str, Any], rank: int
) -> dict[str, Any]:
    """Write this rank's files into `partial` and wait until they are on the disk; returns their fingerprints."""
    shard = partial / f"optimizer-{rank + 1:05d}.safetensors"
    places = {name: {"saved_offsets": offset} for name, offset in parts.offsets.items()}
    save_file(parts.optimizer, shard, metadata={"format": "pt", PLACES: json.dumps(places)})
    written = [shard]
    if rank == 0:
        save_file(parts.draft, partial / DRAFT, metadata={"format": "pt"})
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        # Through a Python file, because torch's own writer does not say why a write failed.
        with (partial / TRAINER).open("wb") as file:
            torch.save({"step": step, "state": state}, file)
        # A state that cannot be read back must show now and not when a run is resumed; mmap leaves the tensors unread.
        torch.load(partial / TRAINER, map_location="cpu", weights_only=True, mmap=True)
        written += [partial / DRAFT, partial / CONFIG, partial / TRAINER]
    for path in written:
        sync(path)
    return {path.name: fingerprint(path) for path in written}


def write_manifest(partial: Path, values: dict[str, Any]) -> None:
    """The last file: with it the checkpoint is whole."""
    (partial / MANIFEST).write_text(json_text({"format": FORMAT, **values}, indent=2) + "\n", "utf-8")
    for path in (partial / MANIFEST, partial):
        sync(path)


def publish(partial: Path, final: Path) -> None:
    """Give the finished directory its name, in place of an older one of the same step."""
    replaced = replaced_name(final)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def replaced_name(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def restore_replaced(directory: Path) -> None:
    """A kill between the two renames of `publish` leaves the older checkpoint under its hidden name: undo it."""
    for replaced in directory.glob(".step-*.replaced"):
        final = replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))
        if not final.exists():
            replaced.rename(final)


def clean_up(directory: Path) -> None:
    """Remove what killed writes have left."""
    restore_replaced(directory)
    for pattern in (".step-*.partial", ".step-*.replaced"):
        for leftover in directory.glob(pattern):
            shutil.rmtree(leftover)


def discard(path: Path) -> None:
    """Remove a checkpoint; renamed first, so that a kill cannot leave half of it under its name."""
    doomed = path.with_name(f".{path.name}.partial")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoint directories by ascending step, verified or not."""
    return sorted((path for path in directory.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def first_flaw(path: Path, exchange: Exchange, rank: int) -> str | None:
    """What is wrong with the checkpoint at `path`, or None; each rank looks at every n-th file."""
    size = len(exchange(None))
    return next((flaw for flaw in exchange(find_flaw(path, rank, size)) if flaw is not None), None)


def find_flaw(path: Path, rank: int = 0, size: int = 1) -> str | None:
    """What is wrong with every `size`-th file of the checkpoint at `path`, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        for name, seal in sorted(manifest["files"].items())[rank::size]:
            if fingerprint(path / name) != seal:
                return f"{name} is not what was written (its size or sha256 differs)"
    except OSError as error:
        return one_line(error)
    except (ValueError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


def score_of(path: Path) -> float | None:
    """The score that the checkpoint was saved with; None without one, or where the manifest cannot be read."""
    try:
        return json.loads((path / MANIFEST).read_bytes())["score"]
    except (OSError, ValueError, KeyError):
        return None


def fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def sync(path: Path) -> None:
    """Wait until a file's contents, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def disk_error(error: BaseException | None) -> BaseException | None:
    """The error of the disk behind `error`, or None if it is something else, a mistake in the code say.

    safetensors has an error class of its own for it, and torch.save raises another error while it closes its file.
    """
    while error is not None and not isinstance(error, OSError | SafetensorError):
        error = error.__context__
    return error
