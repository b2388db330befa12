"""What both sides of a switch are asked, and how requests come: at once, at random times, or a long one to others.

Knows nothing of what is switched, nor of figures.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

from eagle_train.errors import check
from eagle_train.inference import Engine, Output, SamplingParams
from eagle_train.models.target import Target
from evals.contenders import serve
from evals.prompts import Asked, Prompts, arriving

Serve = Callable[[Engine, Sequence[Asked]], list[Output]]
TEXT = {"regex": "[\\x09-\\x7e]*"}  # a grammar that leaves code as it is
GROUPS = 3  # of prompts, of which a store has room for one


@dataclass
class LoadConfig:
    """The keys of conf/commands/switches.yaml that say what is asked. Raises UserError for values that cannot be."""

    questions: str
    repeats: int
    max_tokens: int
    shared_tokens: int
    long_tokens: int
    requests: int
    rate: float
    seed: int

    def __post_init__(self) -> None:
        for key in ("repeats", "shared_tokens", "long_tokens", "requests"):
            check(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: must be at least 1")
        check(self.max_tokens >= 2, f"max_tokens={self.max_tokens}: must be at least 2, for there to be decoding")
        check(self.rate > 0, f"rate={self.rate}: must be above 0")


@dataclass(frozen=True)
class Load:
    """`batches` of what is asked, from the config, the target and the batch size; `serve`: how they come.

    `text`: its name in the report. `warm_up`: how many of the batches are asked before the first is measured. `least`:
    the batch size below which it shows nothing. `beside`: rows that it needs beside the batch's. `newcomers`: how many,
    the last of a batch, are those whose time to the first token counts; 0: all.
    """

    text: str
    batches: Callable[[LoadConfig, Target, int], list[list[Asked]]]
    serve: Serve = serve
    warm_up: int = 1
    least: int = 1
    beside: int = 0
    newcomers: int = 0


def prompts_of(config: LoadConfig, target: Target, **params) -> Prompts:
    params = SamplingParams(max_tokens=config.max_tokens, seed=config.seed, **params)
    return Prompts(Engine(target), config.questions, params)


def together(config: LoadConfig, target: Target, size: int, **params) -> list[list[Asked]]:
    """The questions as they are."""
    return prompts_of(config, target, **params).batches(config.repeats, size, None)


def long(config: LoadConfig, target: Target, size: int) -> list[list[Asked]]:
    """Prompts of `long_tokens`."""
    return prompts_of(config, target).batches(config.repeats, size, config.long_tokens)


def shared(config: LoadConfig, target: Target, size: int) -> list[list[Asked]]:
    """The same prompts again and again, which all begin alike."""
    prompts = prompts_of(config, target)
    stem = prompts.batches(1, 1, config.shared_tokens)[0][0].prompt
    (batch,) = prompts.batches(1, size, None)
    return [[replace(each, prompt=stem + each.prompt) for each in batch]] * config.repeats


def evicted(config: LoadConfig, target: Target, size: int) -> list[list[Asked]]:
    """Groups of prompts by turns: until a group comes again, the others have taken its blocks."""
    groups = prompts_of(config, target).batches(GROUPS, size, config.shared_tokens)
    return list(islice(cycle(groups), max(config.repeats, GROUPS)))


def with_latecomer(config: LoadConfig, target: Target, size: int) -> list[list[Asked]]:
    """Questions, and a prompt of `long_tokens` behind them. All answers are as long as they may be."""
    prompts = prompts_of(config, target, ignore_eos=True)
    late = prompts.batches(config.repeats, 1, config.long_tokens)
    return [batch + last for batch, last in zip(prompts.batches(config.repeats, size, None), late, strict=True)]


def at_random(config: LoadConfig, target: Target, size: int) -> list[list[Asked]]:
    """`requests` questions, `rate` of them a second on average, whatever the batch size."""
    batches = prompts_of(config, target).batches(config.repeats, config.requests, None)
    return arriving(batches, config.rate, config.seed)


def serve_latecomer(engine: Engine, asked: Sequence[Asked]) -> list[Output]:
    """The last one comes when all others have their first tokens."""
    *others, last = asked
    requests = [engine.add(each.prompt, each.params) for each in others]
    while not all(request.generated for request in requests):
        engine.step()
    requests.append(engine.add(last.prompt, last.params))
    while engine.scheduler.unfinished:
        engine.step()
    return [engine.requests.output(request) for request in requests]


def serve_in_turn(engine: Engine, asked: Sequence[Asked]) -> list[Output]:
    """As `serve`, but whoever comes waits until those before it are all done (static batching)."""
    outputs: list[Output] = []
    started = time.perf_counter()
    while len(outputs) < len(asked):
        waiting = asked[len(outputs) :]
        time.sleep(max(0.0, started + waiting[0].arrival - time.perf_counter()))
        now = time.perf_counter() - started
        here = [replace(each, arrival=each.arrival - now) for each in waiting if each.arrival <= now]
        outputs += serve(engine, here[: engine.max_batch_size])
    return outputs


GREEDY = Load("temperature 0", together)
SAMPLED = Load("temperature 1, top-p 0.9", partial(together, temperature=1.0, top_p=0.9))
GUIDED = Load("temperature 0, grammar", partial(together, grammar=TEXT))
LONG = Load("temperature 0, long prompts", long)
SHARED = Load("shared beginnings, asked again", shared)
EVICTED = Load("more prompts than the store holds, asked again", evicted, warm_up=GROUPS)
LATECOMER = Load("a long prompt comes to a batch", with_latecomer, serve_latecomer, beside=1, newcomers=1)
ARRIVALS = Load("requests at random times", at_random, least=2)
