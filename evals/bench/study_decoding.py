"""How a variant of an experiment decodes. Knows nothing of studies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_train.errors import OptionError, UserError, check
from eagle_train.inference import EngineConfig
from eagle_train.inference.options import DraftOptions
from eagle_train.inference.requests.sampling_keys import SamplingKeys
from eagle_train.models.draft_quantisation import Quant
from eagle_train.settings import build


@dataclass(kw_only=True)
class Decoding(SamplingKeys):
    """How a variant decodes. `drafting` as of EngineConfig, `alignment` of DraftOptions; `quant`: of the draft. Raises
    UserError for values that cannot be; those of sampling are checked by `decoding_of`."""

    drafting: str = "greedy"
    alignment: str = "accepted"
    quant: Quant = field(default_factory=Quant)

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):  # as JSON has it, in which results are kept with what they follow from
            self.logit_bias = {str(token): number for token, number in self.logit_bias.items()}
        EngineConfig(drafting=self.drafting)
        DraftOptions(alignment=self.alignment)
        drawn = self.drafting != "greedy"
        said = f"drafting={self.drafting}: changes nothing at temperature 0; give a temperature"
        check(not drawn or self.temperature > 0, said, OptionError)


def decoding_of(own: Mapping[str, Any], shared: Mapping[str, Any], place: str, max_tokens: int) -> Decoding:
    """How a variant decodes that has `own` keys in the place of those that all variants share. `place`: of its keys on
    a command line; `max_tokens`: of an answer. Raises UserError."""
    check(isinstance(own, Mapping), f"{place}={own}: must be a mapping of keys to values")
    decoding = build(Decoding, {**shared, **own}, place)
    try:
        decoding.sampling_params(max_tokens=max_tokens)
    except UserError as error:  # it begins with the key
        raise UserError(f"{place}.{error}") from error
    return decoding
