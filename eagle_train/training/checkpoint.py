"""Checkpoints: written whole or not at all, verified before they are used. DESIGN sections 3.10 and 3.11.

A checkpoint is the directory `DIR/step-00001234/` with
    draft.safetensors   the draft's tensors, in the precision the caller gives (fp32 master weights)
    draft.json          the draft's config
    trainer.pt          the step and everything else that a resumed run needs
    manifest.json       size and sha256 of the three files above
Knows nothing of models, optimisers or data: it keeps tensors and state dicts. One process writes.
"""

import hashlib
import json
import os
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_train.config import UserError, check, one_line

FORMAT = 1
DRAFT, CONFIG, TRAINER, MANIFEST = "draft.safetensors", "draft.json", "trainer.pt", "manifest.json"
NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """What `save` was given: draft tensors (on the CPU, dtypes as saved), draft config, and the trainer's state."""

    step: int
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    state: dict[str, Any]


def save(
    directory: Path | str,
    step: int,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step` and remove old ones; returns its directory.

    tensors: name -> tensor, any device, none sharing memory. config: JSON values. state: nested dicts, lists, tuples,
    numbers, strings and tensors, because it is read back with `weights_only=True`. `keep` counts the checkpoints kept
    up to and including this step (0 keeps all); those of later steps, which another run left, are not touched. A
    checkpoint of the same step is replaced. Raises UserError when the disk refuses; earlier checkpoints are then as
    they were.
    """
    directory = Path(directory)
    final = directory / f"step-{step:08d}"
    partial = directory / f".{final.name}.partial-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        clean_up(directory)
        partial.mkdir()
        write_files(partial, step, tensors, config, state)
        publish(partial, final)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = disk_error(error)
        if reason is None:
            raise
        message = f"checkpoint directory {directory}: step {step} could not be written: {one_line(reason)}"
        raise UserError(f"{message}; earlier checkpoints are untouched") from error
    if keep:
        for old in [path for path in checkpoints(directory) if step_of(path) <= step][:-keep]:
            discard(old)
    return final


def latest(directory: Path | str) -> Path | None:
    """The newest checkpoint that is whole; None if there is none.

    A damaged one is passed over with a line on stderr that says which and why. The files are read whole to verify them.
    """
    directory = Path(directory)
    restore_replaced(directory)
    for path in reversed(checkpoints(directory)):
        flaw = find_flaw(path)
        if flaw is None:
            return path
        print(f"warning: checkpoint {path} is passed over: {flaw}", file=sys.stderr)
    return None


def load(path: Path | str) -> Checkpoint:
    """Read one checkpoint after verifying it, all tensors on the CPU. Raises UserError if it is missing or damaged."""
    path = Path(path)
    flaw = find_flaw(path)
    check(flaw is None, f"checkpoint {path}: {flaw}; give a directory step-XXXXXXXX that `save` has finished")
    trainer = torch.load(path / TRAINER, map_location="cpu", weights_only=True)
    config = json.loads((path / CONFIG).read_text("utf-8"))
    return Checkpoint(trainer["step"], load_file(path / DRAFT), config, trainer["state"])


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
    partial: Path, step: int, tensors: dict[str, Tensor], config: dict[str, Any], state: dict[str, Any]
) -> None:
    """Write the four files into `partial` and wait until they are on the disk; the manifest comes last."""
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(whole, partial / DRAFT, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    # Through a Python file, because torch's own writer does not say why a write failed.
    with (partial / TRAINER).open("wb") as file:
        torch.save({"step": step, "state": state}, file)
    # A state that cannot be read back must show now and not when a run is resumed; mmap leaves the tensors unread.
    torch.load(partial / TRAINER, map_location="cpu", weights_only=True, mmap=True)
    files = {name: fingerprint(partial / name) for name in (DRAFT, CONFIG, TRAINER)}
    manifest = {"format": FORMAT, "step": step, "files": files}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    for path in (*partial.iterdir(), partial):
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
    for pattern in (".step-*.partial-*", ".step-*.replaced"):
        for leftover in directory.glob(pattern):
            shutil.rmtree(leftover)


def discard(path: Path) -> None:
    """Remove a checkpoint; renamed first, so that a kill cannot leave half of it under its name."""
    doomed = path.with_name(f".{path.name}.partial-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints(directory: Path) -> list[Path]:
    """The checkpoint directories by ascending step, verified or not."""
    return sorted((path for path in directory.glob("step-*") if NAME.fullmatch(path.name)), key=step_of)


def find_flaw(path: Path) -> str | None:
    """What is wrong with the checkpoint at `path`, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        for name in (DRAFT, CONFIG, TRAINER):
            if fingerprint(path / name) != manifest["files"][name]:
                return f"{name} is not what was written (its size or sha256 differs)"
    except OSError as error:
        return one_line(error)
    except (ValueError, KeyError):
        return f"{MANIFEST} is damaged"
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
