"""Tensors in safetensors files. Knows nothing of what they are."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors to `path`, where the process's umask says who may read it: safetensors alone would let
    nobody but the owner. Raises OSError and SafetensorError."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(mode)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file. Raises OSError, with the reason, and SafetensorError."""
    check_opens(path)
    return load_file(path)


def check_opens(path: Path) -> None:
    """Raise OSError, with the reason, for a file that cannot be opened: safetensors tells each of these as missing."""
    path.open("rb").close()
