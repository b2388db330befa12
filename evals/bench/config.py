"""The keys that evaluations share (conf/bench), checked in one place. Knows nothing of what is measured."""

from dataclasses import dataclass, replace
from typing import Any

from eagle_train.errors import check
from eagle_train.inference import EngineConfig
from eagle_train.inference.drafters import drafter_spec, is_eagle
from eagle_train.inference.options import DraftOptions
from eagle_train.inference.requests.sampling_keys import SamplingKeys
from eagle_train.inference.requests.sampling_params import is_whole
from eagle_train.models.draft_quantisation import Quant
from eagle_train.models.loading import TargetConfig
from eagle_train.settings import build


@dataclass(kw_only=True)
class BenchConfig:
    """conf/bench/base.yaml and default.yaml, which says what each key is. Raises UserError for values that cannot be.

    `options`: the keys of `engine` as an EngineConfig.
    """

    target: TargetConfig
    draft: DraftOptions
    engine: dict[str, Any]
    questions: str
    max_tokens: int
    seed: int
    device: str
    threads: int | None
    out: str

    def __post_init__(self) -> None:
        check(self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1, or null")
        self.options = build(EngineConfig, self.engine, "engine")
        rows = self.options.max_batch_size
        check(
            rows == EngineConfig.max_batch_size,
            f"engine.max_batch_size={rows}: follows from the batch size here; leave it out",
        )


@dataclass(kw_only=True)
class SampledConfig(SamplingKeys, BenchConfig):
    """conf/bench/temperature.yaml. `params`: how answers are sampled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.params = self.sampling_params(max_tokens=self.max_tokens, seed=self.seed)


@dataclass(kw_only=True)
class RelaxedConfig(SampledConfig):
    """The same with conf/bench/relaxed.yaml, whose keys `params` has too."""

    relaxed_topk: int
    relaxed_delta: float
    relaxed_thinking: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        keys = ("relaxed_topk", "relaxed_delta", "relaxed_thinking")
        self.params = replace(self.params, **{key: getattr(self, key) for key in keys})


@dataclass(kw_only=True)
class DrafterConfig(RelaxedConfig):
    """The same with the group `drafter`. `spec`: what is called to make the drafter."""

    drafter: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.spec = drafter_spec(self.drafter)
        self.draft.check_read_by(self.spec)

    @property
    def is_eagle(self) -> bool:
        """Whether the drafter is EAGLE's, which alone needs a draft."""
        return is_eagle(self.spec)

    def check_draft(self, *quants: Quant) -> None:
        """Raise UserError where EAGLE has no draft, or where `quants` quantise none."""
        path = self.draft.path
        check(path is not None or not self.is_eagle, "draft is needed: give draft=DIR, or drafter=ngram, say")
        for quant in quants:
            scheme = quant.scheme
            check(path is not None or scheme == "none", f"quant.scheme={scheme}: no draft to quantise; give draft=DIR")


def check_least(config: Any, least: int, *keys: str) -> None:
    """Raise UserError for a key of a config whose value is smaller."""
    for key in keys:
        value = getattr(config, key)
        check(value >= least, f"{key}={value}: must be at least {least}")


def check_decodes(max_tokens: int) -> None:
    """Raise UserError for answers too short to measure decoding: the prefill gives their first token."""
    check(max_tokens >= 2, f"max_tokens={max_tokens}: must be at least 2, for there to be decoding")


def check_sizes(key: str, sizes: list[int]) -> None:
    """Raise UserError where a list of numbers is empty, or one of them is below 1."""
    right = bool(sizes) and all(is_whole(size, 1) for size in sizes)
    check(right, f"{key}={sizes}: must be numbers from 1 on")
