"""The settings of `eagle-doctor`; conf/commands/doctor.yaml says what each one means."""

from dataclasses import dataclass

from eagle_train.corpus.source import DataConfig, check_prompts
from eagle_train.diagnosis.vllm import VLLM
from eagle_train.errors import check
from eagle_train.models.loading import TargetConfig

SERVED_IN = ("bfloat16", "float16", "float32")


@dataclass
class DraftPath:
    """The draft that is examined: a directory or a hub id."""

    path: str | None


@dataclass
class DoctorConfig:
    """All settings of an examination. Raises UserError for values that cannot be."""

    target: TargetConfig
    data: DataConfig
    draft: DraftPath
    trained: str | None
    out: str
    limit: int
    max_tokens: int
    depth: int
    vllm: VLLM
    batch_size: int
    serving_dtype: str | None
    device: str
    seed: int

    def __post_init__(self) -> None:
        check(bool(self.draft.path), "draft is needed: give draft=DIR")
        check(not self.target.cached, "target=cached: has no layers to answer with; give the target")
        check_prompts(self.data)
        for name, least in (("limit", 2), ("max_tokens", 4), ("depth", 1), ("batch_size", 1)):
            check(getattr(self, name) >= least, f"{name}={getattr(self, name)}: must be at least {least}")
        known = self.serving_dtype is None or self.serving_dtype in SERVED_IN
        check(known, f"serving_dtype={self.serving_dtype}: must be null or one of {', '.join(SERVED_IN)}")

    @property
    def path(self) -> str:
        """The draft's directory or hub id."""
        assert self.draft.path is not None, "checked"
        return self.draft.path
