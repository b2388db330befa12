"""The draft of a training run's checkpoint, and how it was trained: what `eagle-export` reads of a run."""

import json
import re
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle_train.artifacts.convert import Source
from eagle_train.artifacts.format import CONFIG
from eagle_train.artifacts.hub import fetch
from eagle_train.artifacts.tensors import load_tensors
from eagle_train.drafts import Draft, saved_config
from eagle_train.errors import UserError, check
from eagle_train.models.target import Identity
from eagle_train.results import redact
from eagle_train.training.checkpoint.format import MANIFEST, Checkpoint, checkpoints
from eagle_train.training.checkpoint.store import CheckpointStore
from eagle_train.training.checkpoint.verify import open_checkpoint

NO_CHECKPOINT = "no checkpoint there; give the directory of a training run"
_CONFIG_PARTS = ("data", "train", "optim", "seed")  # of a run's config, kept in the artifact
_LOSS = re.compile("^loss$|l1$|ce$|agreement$|^heldout_")  # names of a step's metrics that are kept


def draft_directory(name: str, field: str) -> Path:
    """The directory of a run, a checkpoint or an artifact, given as a path or hub id. Raises UserError, which names
    `field`, where there is none."""
    path = fetch(name, field)
    check(path.exists(), f"{field}={name}: no such directory; give one, or a hub id (OWNER/NAME)")
    check((path / CONFIG).is_file() or has_checkpoint(path), f"{field}={name}: {NO_CHECKPOINT}")
    return path


def has_checkpoint(path: Path) -> bool:
    """Whether a directory is a checkpoint, or a run that has one."""
    return (path / MANIFEST).exists() or bool(checkpoints(path))


def trained_draft(path: Path) -> Source:
    """The draft that `read_trained` reads, its embedding scale folded into `fc`, with its description."""
    found, draft = read_trained(path)
    return Source.of(draft.folded(), Identity(**found.state["target"]), _history(found), found.path)


def read_trained(path: Path) -> tuple[Checkpoint, Draft]:
    """A checkpoint, or the newest one in a run's directory, and its draft. Raises UserError if there is none."""
    if not (path / MANIFEST).exists():
        newest = CheckpointStore(path).latest()
        if newest is None:
            raise UserError(f"checkpoint={path}: {NO_CHECKPOINT}")
        path = newest
    found = open_checkpoint(path)
    draft = saved_config(found.config, f"{path}: draft").module()
    load_tensors(draft, found.draft(), f"checkpoint={path}")
    return found, draft


def _history(found: Checkpoint) -> dict[str, Any]:
    """How a checkpoint was trained: steps, tokens, its losses, parts of the run's config."""
    history = {"steps": found.step, "tokens": found.state["tokens"], "checkpoint": found.path.name}
    history["hours"] = found.state["seconds"] / 3600
    records, config = found.path.parent / "metrics.jsonl", found.path.parent / "config.yaml"
    if records.is_file():
        every = map(json.loads, records.read_text("utf-8").splitlines())
        own: dict[str, Any] = next((record for record in every if record["step"] == found.step), {})
        history["metrics"] = {name: value for name, value in own.items() if _LOSS.search(name)}
    if config.is_file():
        values = OmegaConf.to_container(OmegaConf.load(config))
        assert isinstance(values, dict)  # config.yaml is the run's own
        history |= {key: redact(values[key], key) for key in _CONFIG_PARTS if key in values}
    return history
