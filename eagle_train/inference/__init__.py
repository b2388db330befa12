"""The bundled inference harness: the paper's pipeline from prefill to bookkeeping. Knows nothing of training."""

from eagle_train.inference.engine import Engine
from eagle_train.inference.requests.sequence import Output, SamplingParams, Stats

__all__ = ["Engine", "Output", "SamplingParams", "Stats"]
