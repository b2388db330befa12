"""Whether a run may continue from a checkpoint. Knows nothing of how tensors are restored."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle_train.corpus.stream import Stream
from eagle_train.drafts import DraftConfig, saved_config
from eagle_train.errors import UserError, check
from eagle_train.models.target import TargetEnds
from eagle_train.training.checkpoint.format import Checkpoint
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.state import TrainState
from eagle_train.training.train_config import TrainConfig


def check_budget(train: TrainConfig, path: Path, state: TrainState) -> None:
    """Raise UserError where the checkpoint at `path` has used more steps or minutes than the run is to have."""
    steps, minutes = train.steps, train.minutes
    check(
        steps is None or state.step <= steps,
        f"train.steps={steps}: {path} has made {state.step} already; give as many or more",
    )
    check(
        minutes is None or state.seconds <= 60 * minutes,
        f"train.minutes={minutes}: {path} has used {state.seconds / 60:.1f} already; give as many or more",
    )


def check_state(train: TrainConfig, stream: Stream, path: Path) -> None:
    """Raise UserError, before the target is loaded, where the run cannot continue from the checkpoint at `path`, for
    its length, its target's precision or its data. A torn one is left to `CheckpointStore.latest`."""
    try:
        found = Checkpoint.load(path)
        state = TrainState.restored(found.step, found.state)
    except Exception:  # a damaged file may raise anything
        return
    check_budget(train, path, state)
    _check_target_quant(train, path, found.state)
    stream.check_same(state.stream)


def _check_target_quant(train: TrainConfig, path: Path, saved: Mapping[str, Any]) -> None:
    then = saved["target_quant"]
    check(
        then == train.target_quant,
        f"train.target_quant={train.target_quant}: {path} was trained with {then}; resume with the same",
    )


def check_same_draft(path: Path, trained: DraftConfig, draft: DraftConfig) -> None:
    """Raise UserError where the checkpoint at `path`, of the draft `trained`, was made with another."""
    if trained.kind != draft.kind:
        raise UserError(f"draft={draft.kind}: {path} was trained with draft={trained.kind}; resume with the same")
    for name, value in dataclasses.asdict(draft).items():
        then = getattr(trained, name)
        mine, theirs = (f"={value}", then) if name != "vocabulary" else ("", "other tokens")
        check(then == value, f"draft.{name}{mine}: {path} was trained with {theirs}; resume with the same draft")


def check_same_run(
    found: Checkpoint,
    draft: DraftConfig,
    target: TargetEnds,
    train: TrainConfig,
    optim: OptimConfig,
    optimizer_names: Iterable[str],
) -> None:
    """Raise UserError where the checkpoint was made with another draft, target, precision of it, or optimiser.

    `optimizer_names`: the names of the tensors in this run's optimiser.
    """
    path = found.path
    check_same_draft(path, saved_config(found.config, f"{path}: draft"), draft)
    made_for = found.state["target"]
    if made_for["fingerprint"] != target.identity.fingerprint:
        raise UserError(f"target.path={target.name}: {path} was trained for {made_for['name']}")
    _check_target_quant(train, path, found.state)
    saved = found.names
    missing = next((name for name in optimizer_names if name not in saved), None)
    check(
        missing is None,
        f"optim.name={optim.name}: {path} was trained with another, without {missing}; resume with the same",
    )
