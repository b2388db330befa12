"""The workloads of a switch: what is asked, and how requests arrive: at once, at random times, or a long one later.

Knows nothing of what is switched, nor of statistics.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

from eagle_train.errors import check
from eagle_train.inference import Engine, Output, SamplingParams
from evals.bench.answering import arrived, serve
from evals.bench.config import BenchConfig, check_decodes, check_least
from evals.bench.requests import PromptSource, TimedRequest, with_arrivals
from evals.bench.session import Session

Serve = Callable[[Engine, Sequence[TimedRequest]], list[Output]]
Batches = list[list[TimedRequest]]
TEXT = {"regex": "[\\x09-\\x7e]*"}  # a grammar that allows any code
GROUPS = 3  # of prompts; the cache has room for one group


@dataclass(kw_only=True)
class WorkloadConfig(BenchConfig):
    """The keys of conf/commands/switches.yaml that say what is asked. Raises UserError for values that cannot be."""

    repeats: int
    shared_tokens: int
    long_tokens: int
    requests: int
    rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "repeats", "shared_tokens", "long_tokens", "requests")
        check_decodes(self.max_tokens)
        check(self.rate > 0, f"rate={self.rate}: must be above 0")


@dataclass(frozen=True)
class Workload:
    """`batches`: the requests, from the session and the batch size. `serve`: how they arrive.

    `text`: its name in the report. `warm_up`: how many of the batches are answered before the first is measured.
    `least_size`: the smallest batch size at which it shows anything. `extra_rows`: beside the batch's. `newcomers`: how
    many requests, the last of a batch, are those whose time to the first token counts; 0: all. `asks_again`: whether it
    is about prompts that come again.
    """

    text: str
    batches: Callable[[Session, int], Batches]
    serve: Serve = serve
    warm_up: int = 1
    least_size: int = 1
    extra_rows: int = 0
    newcomers: int = 0
    asks_again: bool = False


def prompts_of(session: Session, **params: Any) -> PromptSource:
    """The session's questions; `params`: more of `SamplingParams`."""
    config = session.config
    given = SamplingParams(max_tokens=config.max_tokens, seed=config.seed, **params)
    return PromptSource(session.requests, session.questions, given)


def as_they_are(session: Session, size: int, **params: Any) -> Batches:
    """The questions as they are."""
    return prompts_of(session, **params).batches(session.config.repeats, size, None)


def long_prompts(session: Session, size: int) -> Batches:
    """Prompts of `long_tokens`."""
    return prompts_of(session).batches(session.config.repeats, size, session.config.long_tokens)


def shared_beginnings(session: Session, size: int) -> Batches:
    """The same prompts in every batch, all with the same `shared_tokens` at the beginning."""
    prompts = prompts_of(session)
    stem = prompts.batches(1, 1, session.config.shared_tokens)[0][0].prompt
    (batch,) = prompts.batches(1, size, None)
    return [[replace(each, prompt=stem + each.prompt) for each in batch]] * session.config.repeats


def evicted_groups(session: Session, size: int) -> Batches:
    """Groups of prompts in turn: by the time a group comes again, its blocks were evicted."""
    groups = prompts_of(session).batches(GROUPS, size, session.config.shared_tokens)
    return list(islice(cycle(groups), max(session.config.repeats, GROUPS)))


def with_latecomer(session: Session, size: int) -> Batches:
    """Questions, and a prompt of `long_tokens` after them. All answers have `max_tokens`."""
    prompts, repeats = prompts_of(session, ignore_eos=True), session.config.repeats
    late = prompts.batches(repeats, 1, session.config.long_tokens)
    return [batch + last for batch, last in zip(prompts.batches(repeats, size, None), late, strict=True)]


def at_random(session: Session, size: int) -> Batches:
    """`requests` questions, `rate` of them a second on average, whatever the batch size."""
    config = session.config
    batches = prompts_of(session).batches(config.repeats, config.requests, None)
    return with_arrivals(batches, config.rate, config.seed)


def serve_latecomer(engine: Engine, requests: Sequence[TimedRequest]) -> list[Output]:
    """The last request arrives when all others have their first tokens."""
    *others, last = requests
    added = [engine.add(each.prompt, each.params) for each in others]
    while not all(request.generated for request in added):
        engine.step()
    added.append(engine.add(last.prompt, last.params))
    while engine.has_unfinished:
        engine.step()
    return [engine.output(request) for request in added]


def serve_static(engine: Engine, requests: Sequence[TimedRequest]) -> list[Output]:
    """As `serve`, but new requests wait until those before them are all finished (static batching)."""
    outputs: list[Output] = []
    started = time.perf_counter()
    while len(outputs) < len(requests):
        waiting = requests[len(outputs) :]
        time.sleep(max(0.0, started + waiting[0].arrival - time.perf_counter()))
        now = time.perf_counter() - started
        here = [replace(each, arrival=each.arrival - now) for each in waiting[: arrived(engine, waiting, now)]]
        outputs += serve(engine, here[: engine.config.max_batch_size])
    return outputs


GREEDY = Workload("temperature 0", as_they_are)
SAMPLED = Workload("temperature 1, top-p 0.9", partial(as_they_are, temperature=1.0, top_p=0.9))
GUIDED = Workload("temperature 0, grammar", partial(as_they_are, grammar=TEXT))
LONG = Workload("temperature 0, long prompts", long_prompts)
SHARED = Workload("shared beginnings, asked again", shared_beginnings, asks_again=True)
EVICTED = Workload("more prompts than the store holds, asked again", evicted_groups, warm_up=GROUPS, asks_again=True)
LATECOMER = Workload("a long prompt comes to a batch", with_latecomer, serve_latecomer, extra_rows=1, newcomers=1)
ARRIVALS = Workload("requests at random times", at_random, least_size=2)
