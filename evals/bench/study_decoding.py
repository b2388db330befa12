"""How a variant of an experiment decodes. Knows nothing of studies."""

from dataclasses import dataclass, field

from eagle_train.errors import OptionError, check
from eagle_train.inference import EngineConfig, SamplingParams
from eagle_train.inference.options import DraftOptions
from eagle_train.models.draft_quantisation import Quant


@dataclass
class Decoding:
    """How a variant decodes. `drafting` as of EngineConfig, `alignment` of DraftOptions, `temperature` and `top_p` of
    SamplingParams; `quant`: of the draft. Raises UserError for values that cannot be."""

    drafting: str = "greedy"
    alignment: str = "accepted"
    temperature: float = 0.0
    top_p: float = 0.9
    quant: Quant = field(default_factory=Quant)

    def __post_init__(self) -> None:
        EngineConfig(drafting=self.drafting)
        DraftOptions(alignment=self.alignment)
        SamplingParams(self.temperature, self.top_p)
        drawn = self.drafting != "greedy"
        said = f"drafting={self.drafting}: changes nothing at temperature 0; give a temperature"
        check(not drawn or self.temperature > 0, said, OptionError)
