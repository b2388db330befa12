"""What tests of evals.switches share: models and a table of trees, a config, and answers that took given times."""

from pathlib import Path

from eagle_train.inference import Output, Stats
from eagle_train.inference.options import DraftOptions
from eagle_train.models.loading import TargetConfig
from evals.bench.questions import Question
from evals.bench.statistics import Answer
from evals.switches import Config
from tests.support.eval_inputs import make_home

TABLE = "1: {parents: [-1, 0]}\n2: {parents: [-1, 0, 0]}\n3: {parents: [-1]}\n"


def make_switches_home(directory: Path) -> Path:
    """As `make_home`, with table.yaml for the switch of the dispatcher."""
    make_home(directory, width=128)
    (directory / "table.yaml").write_text(TABLE)
    return directory


def switches_config(home: Path, **changes) -> Config:
    values = {
        "target": TargetConfig(str(home / "target")),
        "draft": DraftOptions(str(home / "draft")),
        "tree": "chain3",
        "table": str(home / "table.yaml"),
        "chunk_tokens": 16,
        "engine": {},
        "switches": None,
        "batch_sizes": [2],
        "questions": str(home / "questions.jsonl"),
        "shared_tokens": 40,
        "long_tokens": 70,
        "requests": 3,
        "rate": 100.0,
        "repeats": 2,
        "out": str(home / "out"),
        "max_tokens": 4,
        "seed": 0,
        "device": "cpu",
        "threads": None,
    }
    return Config(**values | changes)


def timed_answers(ttft: float, ttit: float, rounds: tuple[int, ...] = (2, 1)) -> list[Answer]:
    """A batch of one request. `ttit`: seconds for each token; `rounds`: how many tokens each round committed."""
    tokens = sum(rounds)
    stats = Stats(calls=len(rounds), tokens=tokens, ttft_s=ttft, intervals_s=[ttit] * tokens)
    return [
        Answer(Question(1, 1, None, [], ["?"]), 1, [7], Output([5] * (tokens + 1), "", "stop", stats, list(rounds)))
    ]
