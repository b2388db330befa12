"""The settings of `eagle-regenerate`; conf/commands/regenerate.yaml says what each one means."""

from dataclasses import dataclass
from typing import Any

from eagle_train.corpus.source import DataConfig, check_prompts, check_variables
from eagle_train.errors import check
from eagle_train.inference import SamplingParams
from eagle_train.inference.drafters import drafter_name, drafter_spec, is_eagle
from eagle_train.inference.options import DraftOptions
from eagle_train.inference.requests.sampling_keys import SamplingKeys
from eagle_train.models.loading import TargetConfig

BATCHES_AHEAD = 8  # batches that are in flight before the row that is written next


@dataclass
class ServerConfig:
    """An OpenAI-compatible server. Raises UserError for values that cannot be."""

    url: str | None
    model: str | None
    retries: int
    timeout_s: float
    gone_after: int

    def __post_init__(self) -> None:
        known = self.url is None or self.url.startswith(("http://", "https://"))
        check(known, f"server.url={self.url}: must begin with http:// or https://")
        check(self.retries >= 0, f"server.retries={self.retries}: must be 0 or more")
        check(self.timeout_s > 0, f"server.timeout_s={self.timeout_s}: must be above 0")
        check(self.gone_after >= 1, f"server.gone_after={self.gone_after}: must be at least 1")


@dataclass(kw_only=True)
class RegenerateConfig(SamplingKeys):
    """All settings of a run. Raises UserError for values that cannot be."""

    target: TargetConfig
    data: DataConfig
    out: str
    retry_left_out: bool
    limit: int | None
    max_tokens: int
    seed: int
    batch_size: int
    device: str
    draft: DraftOptions
    drafter: dict[str, Any]
    server: ServerConfig

    def __post_init__(self) -> None:
        check_prompts(self.data)
        check_variables(self.target.template_kwargs, self.data)
        check(self.limit is None or self.limit >= 1, f"limit={self.limit}: must be at least 1, or null")
        check(self.batch_size >= 1, f"batch_size={self.batch_size}: must be at least 1")
        check(self.out.endswith(".jsonl"), f"out={self.out}: must end in .jsonl")
        on_server = self.server.url is not None
        is_dated = on_server and self.data.date is not None
        check(not is_dated, f"data.date={self.data.date}: a server renders its prompts itself; leave it out")
        template = self.target.chat_template if on_server else None
        check(template is None, f"target.chat_template={template}: a server renders its prompts itself; leave it out")
        check(not (on_server and self.draft.path), f"draft.path={self.draft.path}: a server has its own; leave it out")
        self.spec = drafter_spec(self.drafter)
        self.draft.check_read_by(self.spec)
        is_own = on_server and not is_eagle(self.spec)
        check(not is_own, f"drafter={drafter_name(self.spec)}: a server has its own; leave it out")
        self.params = self.sampling_params(max_tokens=self.max_tokens, seed=self.seed)

    def params_for(self, seed: int) -> SamplingParams:
        """Sampling parameters of a turn whose own seed is `seed`, the same after a resume."""
        return self.params.with_seed_after(seed)

    @property
    def model(self) -> str:
        """The name of whoever answers: the server's model, or the target."""
        return (self.server.model if self.server.url else None) or self.target.path
