"""Where the time of a round goes: the engine's stages, and the models' forwards within them.

A GPU is waited for around each of them, which makes rounds slower: latency is measured elsewhere, on rounds without
these waits. Knows nothing of prompts or reports.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from eagle_train.drafts import Draft
from eagle_train.errors import check
from eagle_train.inference import Engine
from eagle_train.inference.decode.graphs import Graphs
from eagle_train.models.target import LMHead, Target
from eagle_train.ops.compiled import Compiled
from evals.bench.requests import TimedRequest
from evals.bench.statistics import no_decoding

FORWARDS = (
    (Target, "hidden_states"),
    (Draft, "__call__"),  # of whatever kind
    (Compiled, "__call__"),
    (Target, "embed"),  # the draft has no embedding of its own
    (LMHead, "__call__"),
    (Graphs, "propose"),
    (Graphs, "validate"),
)


def runs_ahead(device: torch.device) -> bool:
    """Whether the host only launches work there, so that a stage ends on the host before its work does."""
    return device.type == "cuda"


def wait_for_gpu() -> None:
    """Wait for all launched work, but not while a CUDA graph is recorded, when nothing runs."""
    if not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


def timed(function: Callable, report: Callable[[float], None], wait: Callable[[], None] = lambda: None) -> Callable:
    """`function`, which reports after each call how many seconds it took. `wait`: called before and after it."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        wait()
        started = time.perf_counter()
        result = function(*arguments, **options)
        wait()
        report(time.perf_counter() - started)
        return result

    return wrapped


class StageClock:
    """Seconds by stage of an engine, and how much of them the forwards of target, draft and LM head took, or CUDA
    graphs of them.

    `runs`: how often each stage ran. `rounds`: how many were launched; with overlap there is one more step than that,
    and there may be one more round than any answer counts.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.wait = wait_for_gpu if runs_ahead(engine.target.device) else lambda: None
        self.seconds: dict[str, float] = defaultdict(float)
        self.forwards: dict[str, float] = defaultdict(float)
        self.runs: Counter[str] = Counter()
        self._stage = ""

    @property
    def rounds(self) -> int:
        """Rounds that were launched."""
        return self.runs["validation"]

    @contextmanager
    def running(self, forwards: bool = True) -> Iterator[None]:
        """Within, the engine's stages are timed here, in place of its `stage_times`, and the forwards of every model.

        `forwards`: False times the stages alone, so that waits within them do not slow them.
        """
        with ExitStack() as stack:
            for owner, name in FORWARDS if forwards else ():
                method = timed(getattr(owner, name), self._add_forward, self.wait)
                stack.enter_context(patch.object(owner, name, method))
            stack.enter_context(patch.object(self.engine.stage_times, "stage", self._time_stage))
            yield

    def _add_forward(self, seconds: float) -> None:
        self.forwards[self._stage] += seconds

    @contextmanager
    def _time_stage(self, stage: str) -> Iterator[None]:
        self.wait()
        self._stage, started = stage, time.perf_counter()
        self.runs[stage] += 1
        yield
        self.wait()
        self.seconds[stage] += time.perf_counter() - started


def breakdown(engine: Engine, batches: Sequence[Sequence[TimedRequest]]) -> dict[str, Any]:
    """Each batch is read, then decoded. Milliseconds per round of decoding; `prefill_ms` per batch.

    `draft_latency_ms`: per round that drafts. `outside`: the share of decoding in which no forward of target, draft or
    LM head runs. `rest`: the time in no stage, the dispatcher's for example. Raises UserError where every answer ends
    with its first token.
    """
    prefill, clock = StageClock(engine), StageClock(engine)
    seconds = 0.0
    for batch in batches:
        requests = [engine.add(each.prompt, each.params) for each in batch]
        with prefill.running(forwards=False):
            while not all(request.generated or request.finish_reason for request in requests):
                engine.step()
        with clock.running():
            while engine.has_unfinished:
                started = time.perf_counter()
                engine.step()
                clock.wait()
                seconds += time.perf_counter() - started
    rounds = clock.rounds
    check(rounds > 0, no_decoding(max(each.params.max_tokens for batch in batches for each in batch)))
    stages = {stage: 1e3 * spent / rounds for stage, spent in clock.seconds.items()}
    drafted = max(clock.runs["drafting"], 1)
    return {
        "rounds": rounds,
        "round_ms": 1e3 * seconds / rounds,
        "prefill_ms": 1e3 * prefill.seconds["prefill"] / len(batches),
        "draft_latency_ms": 1e3 * clock.seconds["drafting"] / drafted,
        "stages_ms": {**stages, "rest": 1e3 * seconds / rounds - sum(stages.values())},
        "forwards_ms": {stage: 1e3 * spent / rounds for stage, spent in clock.forwards.items()},
        "outside": 1 - sum(clock.forwards.values()) / seconds,
    }
