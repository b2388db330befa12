"""The config and the session of evals.latency on tiny random models."""

import tempfile

from eagle_train.inference import SamplingParams
from eagle_train.inference.drafters import EAGLE
from eagle_train.inference.requests.sampling_keys import KEYS
from eagle_train.models.loading import TargetConfig
from eagle_train.models.target import Target
from eagle_train.training.cost.estimate import ClusterConfig
from evals.bench.latency_config import Config
from evals.bench.random_models import RandomDraftOptions
from evals.bench.session import Session
from tests.support.tiny import tiny_draft


def latency_config(**changes) -> Config:
    values = {
        **{
            "draft": RandomDraftOptions("somewhere", window=None, sink=False),
            "target": TargetConfig("t"),
            "acceptance": None,
            "drafter": {"_target_": EAGLE, "alignment": "accepted"},
            "trees": ["chain3"],
            "quants": ["none"],
        },
        **{"batch_sizes": [1], "context_lengths": None, "questions": "q.jsonl", "repeats": 2, "rate": None},
        **{
            "requests": 4,
            "out": str(tempfile.gettempdir()),
            "max_tokens": 9,
            "ignore_eos": False,
            "transformers": True,
            **{name: getattr(SamplingParams(), name) for name in KEYS},
            "relaxed_topk": 0,
            "relaxed_delta": 0.0,
            "relaxed_thinking": False,
        },
        **{
            "seed": 0,
            "transformers": True,
            "prompt_lookup": 10,
            "profile": False,
            "plan": False,
            "cluster": ClusterConfig(),
            "engine": {},
            "device": "cpu",
            "threads": None,
        },
    }
    return Config(**values | changes)


def session_of(target: Target, config: Config) -> Session:
    """A session of these models, without reading any file."""
    made = Session.__new__(Session)
    made.config, made.questions, made.target, made.draft = config, [], target, tiny_draft(target)
    return made
