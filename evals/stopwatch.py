"""Where the time of a round goes: the stages of paper figure 4b, and the models' forwards within them.

A GPU is waited for around each of them, which costs it some of its speed: latency is measured elsewhere, on rounds that
nobody watches. Knows nothing of prompts or reports.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from eagle_train.errors import check
from eagle_train.inference import Engine
from eagle_train.models.draft import Draft
from eagle_train.models.target import LMHead, Target
from eagle_train.ops.compiled import Compiled
from eagle_train.ops.graphs import Recording
from evals.prompts import Asked

FORWARDS = (
    (Target, "hidden_states"),
    (Draft, "forward"),
    (Compiled, "__call__"),
    (Target, "embed"),  # the draft has no embedding of its own
    (LMHead, "__call__"),
    (Recording, "__call__"),
)


def runs_ahead(device: torch.device) -> bool:
    """Whether a stage only tells the device what to do, so that it ends before the work does."""
    return device.type == "cuda"


def wait_for_gpu() -> None:
    """But not while it records, when nothing runs."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


def timed(function: Callable, told: Callable[[float], None], wait: Callable[[], None] = lambda: None) -> Callable:
    """`function`, which tells after each call how many seconds it took; `wait` is for a device that runs ahead."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        wait()
        started = time.perf_counter()
        result = function(*arguments, **options)
        wait()
        told(time.perf_counter() - started)
        return result

    return wrapped


class Stopwatch:
    """Seconds by stage, and how much of them the target, the draft and the LM head took, or CUDA graphs of them.

    `entered`: how often each stage was. `rounds`: how many were launched; with overlap there is a step more than that,
    and maybe a round more than any answer counts.
    """

    def __init__(self, device: torch.device):
        self.wait = wait_for_gpu if runs_ahead(device) else lambda: None
        self.stages: dict[str, float] = defaultdict(float)
        self.forwards: dict[str, float] = defaultdict(float)
        self.entered: Counter[str] = Counter()
        self.stage = ""

    @property
    def rounds(self) -> int:
        return self.entered["validation"]

    @contextmanager
    def watching(self, forwards: bool = True) -> Iterator[None]:
        """Within, every engine's stages are timed, in the place of its own clock, and every model's forwards.

        `forwards`: False leaves these alone, so that a stage is not slowed by waits within it.
        """
        with ExitStack() as stack:
            for owner, name in FORWARDS if forwards else ():
                stack.enter_context(patch.object(owner, name, timed(getattr(owner, name), self.forward, self.wait)))
            stack.enter_context(patch.object(Engine, "stage", lambda _, name: self.around(name)))
            yield

    def forward(self, seconds: float) -> None:
        self.forwards[self.stage] += seconds

    @contextmanager
    def around(self, stage: str) -> Iterator[None]:
        self.wait()
        self.stage, started = stage, time.perf_counter()
        self.entered[stage] += 1
        yield
        self.wait()
        self.stages[stage] += time.perf_counter() - started


def breakdown(engine: Engine, batches: Sequence[Sequence[Asked]]) -> dict[str, Any]:
    """Batch by batch is read, then decoded; milliseconds, those of decoding per round, `prefill_ms` per batch.

    `draft_latency_ms`: per round that drafts. `outside`: the share of decoding that no forward of target, draft or LM
    head takes. `rest`: what is in no stage, the dispatcher's work among it. Raises UserError where every answer ends
    with its first token.
    """
    watch = Stopwatch(engine.target.device)
    seconds = 0.0
    with watch.watching():
        for batch in batches:
            for each in batch:
                engine.add(each.prompt, each.params)
            while engine.scheduler.waiting or engine.scheduler.reading:
                engine.prefill()
            while engine.scheduler.unfinished:
                started = time.perf_counter()
                engine.step()
                watch.wait()
                seconds += time.perf_counter() - started
    prefill = watch.stages.pop("prefill")
    watch.forwards.pop("prefill")
    rounds = watch.rounds
    check(rounds > 0, "no answer has a second token, so there is no round to watch; raise max_tokens")
    each = {stage: 1e3 * spent / rounds for stage, spent in watch.stages.items()}
    drafted = max(watch.entered["drafting"], 1)
    return {
        "rounds": rounds,
        "round_ms": 1e3 * seconds / rounds,
        "prefill_ms": 1e3 * prefill / len(batches),
        "draft_latency_ms": 1e3 * watch.stages["drafting"] / drafted,
        "stages_ms": {**each, "rest": 1e3 * seconds / rounds - sum(each.values())},
        "forwards_ms": {stage: 1e3 * spent / rounds for stage, spent in watch.forwards.items()},
        "outside": 1 - sum(watch.forwards.values()) / seconds,
    }
