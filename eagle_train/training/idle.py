"""Settings that change nothing beside a run's others: told before it begins, by the run and by its plan.

They are not refused, because presets and scripts give them for other choices too. A default is not told of: nobody need
have given it. Knows nothing of what settings do.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from eagle_train.corpus.source import DataConfig, idle_keys
from eagle_train.drafts import DraftConfig
from eagle_train.errors import typed
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.train_config import TrainConfig

_LOG = logging.getLogger(__name__)


def tell_idle(train: TrainConfig, optim: OptimConfig, data: DataConfig, draft: DraftConfig) -> None:
    """Log a line for each of `idle`."""
    for line in idle(train, optim, data, draft):
        _LOG.info("note: %s", line)


def idle(train: TrainConfig, optim: OptimConfig, data: DataConfig, draft: DraftConfig) -> list[str]:
    """A line for each setting of a run that changes nothing: the field, its value, and why."""
    found = [*_of_group("draft", draft, draft.idle), *idle_keys(data)]
    if optim.name == "adamw":
        found += _of_group("optim", optim, {"momentum": "it is Muon's, and optim.name is adamw"})
    if data.heldout is None:
        keys = ("eval_batches", "eval_depth", "eval_every")[: 3 if train.eval_every else 2]  # 0: none but the last
        found += _of_group("train", train, dict.fromkeys(keys, "nothing is measured where data.heldout is null"))
    lines = [f"{key}={typed(value)}: changes nothing here: {why}" for key, value, why in found]
    if train.steps is not None and optim.warmup_steps > train.steps:
        ends = f"train.steps={train.steps} end before the learning rate has risen to optim.lr={optim.lr}"
        lines.append(f"optim.warmup_steps={optim.warmup_steps}: {ends}")
    return lines


def _of_group(group: str, config: Any, reasons: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """Of these fields those that are not at their defaults: each key, its value and the reason."""
    defaults = {each.name: each.default for each in dataclasses.fields(config)}
    values = {name: getattr(config, name) for name in reasons}
    return [(f"{group}.{name}", value, reasons[name]) for name, value in values.items() if value != defaults[name]]
