"""What tests train, kept on disk for all processes of one run of pytest: its workers, and the ranks that they start."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import torch

from eagle_train.drafts import Draft
from eagle_train.models.target import Target

D = TypeVar("D", bound=Draft)
FOLDER = "TESTS_KEPT"  # the variable that names it to other processes


def begin() -> None:
    """To be called once, before any other process is started."""
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="kept-")


def end() -> None:
    shutil.rmtree(os.environ.pop(FOLDER))


def kept(train: Callable[..., D]) -> Callable[..., D]:
    """`train(target, ...)` once for a target's config and weights and for all else that it is given; each call returns
    a draft of its own. Training depends on nothing else."""

    @wraps(train)
    def trained(target: Target, *arguments: Any, **settings: Any) -> D:
        given = repr((train.__name__, arguments, sorted(settings.items()))).encode()
        file = Path(os.environ[FOLDER], hashlib.sha256(given + contents_of(target)).hexdigest())
        if not file.exists():
            part = file.with_suffix(f".{os.getpid()}")
            torch.save(train(target, *arguments, **settings), part)
            part.rename(file)  # whole, as ranks train at the same time
        return torch.load(file, weights_only=False)

    return trained


def contents_of(target: Target) -> bytes:
    """The class, the config and the weights of a target's model."""
    model, digest = target.model, hashlib.sha256()
    digest.update(repr((type(model), sorted(model.config.to_dict().items(), key=str))).encode())
    for name, weight in model.state_dict().items():
        digest.update(repr((name, weight.dtype, tuple(weight.shape))).encode())
        digest.update(weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
