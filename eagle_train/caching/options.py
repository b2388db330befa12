"""The settings of `eagle-cache` beside those of the run that the cache is for; conf/commands/cache.yaml says what each
one means.
"""

from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from eagle_train.corpus.source import DataConfig
from eagle_train.drafts import DraftConfig, planned_config
from eagle_train.errors import check
from eagle_train.models.loading import TargetConfig, load_config
from eagle_train.models.state_files import PRECISIONS
from eagle_train.settings import build
from eagle_train.training.assembly import check_job, check_lesson
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.optimizer import OptimConfig
from eagle_train.training.train_config import TrainConfig, rows_of_run

MIB = 2**20


@dataclass
class CacheConfig:
    """All settings of a cache. Raises UserError for values that cannot be."""

    out: str
    precision: str
    supervised_only: bool
    shard_mib: int
    device: str
    plan: bool
    verify: bool

    def __post_init__(self) -> None:
        check(self.out != "", "out is empty: give out=DIR")
        known = ", ".join(PRECISIONS)
        check(self.precision in PRECISIONS, f"precision={self.precision}: must be one of {known}")
        check(self.shard_mib >= 1, f"shard_mib={self.shard_mib}: must be at least 1")
        check(not (self.plan and self.verify), "plan=true, verify=true: give one of them")


@dataclass(frozen=True)
class Run:
    """The run that a cache is for: the groups that eagle-train has, and what follows from them."""

    cache: CacheConfig
    train: TrainConfig
    optim: OptimConfig
    parallel: ParallelConfig
    data: DataConfig
    target: TargetConfig
    hf_config: Any
    draft: DraftConfig

    @classmethod
    def of(cls, values: DictConfig, ranks: int) -> "Run":
        """From the composed config. Raises UserError for a run, of `ranks` processes, that could not start."""
        own = {key: values[key] for key in CacheConfig.__dataclass_fields__}
        cache = build(CacheConfig, own, "")
        train, optim = build(TrainConfig, values.train, "train"), build(OptimConfig, values.optim, "optim")
        parallel, data = build(ParallelConfig, values.parallel, "parallel"), build(DataConfig, values.data, "data")
        target = build(TargetConfig, values.target, "target")
        check(not target.cached, f"target=cached: {target.path} is a cache already; give the target itself")
        hf_config = load_config(target)
        check_job(train, optim, parallel, data, target, hf_config, ranks, cache.device)
        settings: Any = OmegaConf.to_container(values.draft)
        draft = planned_config(hf_config, settings)
        check_lesson(train, draft)
        check(
            not (cache.supervised_only and draft.fed_hidden),
            f"supervised_only=true: draft={draft.kind} is fed the final hidden state at every slot; give "
            "supervised_only=false",
        )
        return cls(cache, train, optim, parallel, data, target, hf_config, draft)

    @property
    def most_rows(self) -> int | None:
        """Packed rows that the run reads in its steps; None where it has minutes."""
        return rows_of_run(self.optim, self.train, self.data.row_tokens)
