"""The settings of `eagle-datastore`; conf/commands/datastore.yaml says what each one means."""

from dataclasses import dataclass, replace

from eagle_train.corpus.source import DataConfig
from eagle_train.errors import check
from eagle_train.models.loading import TargetConfig

MOST_SHARD_TOKENS = 1 << 30


@dataclass
class DatastoreConfig:
    """All settings of a build. Raises UserError for values that cannot be."""

    target: TargetConfig
    data: DataConfig
    out: str
    limit: int | None
    shard_tokens: int

    def __post_init__(self) -> None:
        check(self.out != "", "out is empty: give out=DIR")
        check(self.limit is None or self.limit >= 1, f"limit={self.limit}: must be at least 1, or null")
        sound = 1 <= self.shard_tokens <= MOST_SHARD_TOKENS
        check(sound, f"shard_tokens={self.shard_tokens}: must be from 1 to {MOST_SHARD_TOKENS}")
        self.data = replace(self.data, heldout=None)  # held-out texts are for measurements
