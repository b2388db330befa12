"""Tensors in safetensors files. Knows nothing of what they are."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write contiguous tensors to `path`, where the process's umask says who may read it: safetensors alone would let
    nobody but the owner. Raises OSError and SafetensorError."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, None if metadata is None else dict(metadata))
    path.chmod(mode)
