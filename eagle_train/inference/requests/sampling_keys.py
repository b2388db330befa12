"""The keys with which commands say how answers are sampled (conf/sampling). Knows nothing of commands or engines."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from eagle_train.inference.requests.sampling_params import SamplingParams


@dataclass(kw_only=True)
class SamplingKeys:
    """What a command's config inherits; conf/sampling/default.yaml has the keys. Each is as in SamplingParams."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    logit_bias: Any  # a mapping of token ids, which SamplingParams checks
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_tokens: int

    def sampling_params(self, **more: Any) -> SamplingParams:
        """As the keys say, with `more` of what they do not say. Raises UserError."""
        return SamplingParams(**{name: getattr(self, name) for name in KEYS}, **more)


KEYS = tuple(each.name for each in fields(SamplingKeys))


def changed(values: Mapping[str, Any], *left_out: str) -> dict[str, Any]:
    """Which of the keys are not at their defaults in `values`, which may lack some; without those `left_out`."""
    defaults = vars(SamplingParams())
    kept = {name: values[name] for name in KEYS if name in values and name not in left_out}
    return {name: value for name, value in kept.items() if value != defaults[name]}
