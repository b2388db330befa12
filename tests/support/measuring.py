"""Requests, answers and engines for tests of evaluations."""

from pathlib import Path
from typing import Any

from eagle_train.artifacts.format import load_draft
from eagle_train.inference import Eagle, Engine, Output, Requests, SamplingParams, SimulatedAcceptance, Stats
from eagle_train.models.target import Target
from evals.bench.answering import Run
from evals.bench.questions import Question
from evals.bench.requests import TimedRequest
from evals.bench.statistics import Answer
from tests.support.tiny import shared_target, tiny_draft

NO_QUESTION = Question(0, 0, None, [], [])
SHARES = [0.8, 0.6, 0.3]


def timed_requests(*prompts: list[int], arrivals: list[float] | None = None, **params) -> list[TimedRequest]:
    """A request per prompt; without `arrivals` all arrive at once."""
    at = arrivals or [0.0] * len(prompts)
    pairs = zip(prompts, at, strict=True)
    return [TimedRequest(NO_QUESTION, prompt, SamplingParams(**params), second) for prompt, second in pairs]


def answer(token_ids=(), category=None, turn=1, line=1, reason="stop", **stats) -> Answer:
    """An answer with these tokens and statistics."""
    question = Question(line, line, category, [], ["?"])
    return Answer(question, turn, [7], Output(list(token_ids), "", reason, Stats(**stats), []))


def simulated_engine(tree: Any, rows: int = 3, shares: list[float] = SHARES, simulated=SimulatedAcceptance) -> Engine:
    """A tiny engine whose rounds accept with these shares."""
    target = shared_target()
    drafter = Eagle(tiny_draft(target), target)
    return Engine(target, drafter, tree, max_batch_size=rows, acceptance=simulated(shares))


def drafting_run(home: Path, target: Target, tree: Any = "chain3", **options) -> Run:
    """A run with the draft of a home of `eval_inputs`."""
    drafter = Eagle(load_draft(home / "draft"), target)
    return Run(Engine(target, drafter, tree, **options), Requests(target), drafter)
