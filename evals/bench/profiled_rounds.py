"""Profiles of engines' rounds: a trace and its figures for each decoding of each cell of a sweep.

They are made when all latencies are measured, because a profiler makes the host slower. Knows nothing of reports.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from eagle_train.inference import Engine
from eagle_train.profiling import Profile, stage
from eagle_train.progress import progress
from evals.bench.requests import PromptSource, TimedRequest
from evals.bench.sweep import Rows, SweepConfig, Variants, cells_of

STAGES = ("drafting", "validation", "sampling", "bookkeeping")  # see StageTimes
WARM_UP, ROUNDS = 3, 4
_ALL = WARM_UP + 2 * ROUNDS + 1  # the prefill's token counts as one


def profiles(config: SweepConfig, prompts: PromptSource, variants: Variants, folder: Path | None) -> Rows:
    """For each cell and each engine, its name and what `profiled_rounds` says; the traces are in `folder`. None: ranks
    that only take part, which get []. Raises UserError where a trace cannot be written."""
    cells = cells_of(config)
    found: Rows = []
    bar = progress(len(cells), "profile of a batch size and context")
    for number, cell in enumerate(cells, 1):
        batch = prompts.batches(1, cell.batch_size, cell.context_length)[0]
        for name, engine in variants.engines(cell.batch_size).items():
            path = None if folder is None else folder / trace_name(len(found) + 1, name)
            told = profiled_rounds(engine, batch, path)
            found += [{**asdict(cell), "decoding": name, **told}] if told else []
        bar.update(number)
    bar.close()
    return found


def profiled_rounds(engine: Engine, batch: Sequence[TimedRequest], path: Path | None) -> dict[str, Any]:
    """The figures of `ROUNDS` rounds (`Profile.figures`), whose trace is written to `path`.

    The batch is read first; then come `WARM_UP` rounds, `ROUNDS` that are timed without a profiler, and those with it.
    Prompts lose their beginning where the context has no room for the tokens of them all. `path` is None on ranks that
    only hold a part of the target: they run the same rounds, and return {}. Raises UserError where `path` cannot be
    written.
    """
    device = engine.target.device.type
    requests = _read(engine, batch)
    _run(engine, WARM_UP)
    undisturbed = _seconds(engine, device) / ROUNDS
    profile = None if path is None else Profile(device)
    with _named_stages(engine):
        if profile is not None:
            profile.start()
        _run(engine, ROUNDS)
        if profile is not None:
            profile.stop()
    for request in requests:
        engine.cancel(request)
    engine.step()  # it takes what the last round has left
    if profile is None or path is None:
        return {}
    profile.write(path)
    return {"trace": path.name, **profile.figures(STAGES, "round", ROUNDS, undisturbed)}


def tokens_of(prompts: Sequence[int], chunk: int | None, deepest: int) -> int:
    """How many tokens each of these prompts, of so many tokens, is asked for, so that none ends before the rounds do.

    `chunk`: as `prefill_tokens`; `deepest`: of the trees.
    """
    meanwhile = 0 if chunk is None else len(prompts) + sum(prompts) // chunk  # prompts that are read already decode
    return (_ALL + meanwhile) * (deepest + 1)


def trace_name(number: int, decoding: str) -> str:
    """The file of a decoding's trace, of any name."""
    return f"trace_{number}_{re.sub('[^A-Za-z0-9]+', '_', decoding).strip('_')}.json.gz"


def _read(engine: Engine, batch: Sequence[TimedRequest]) -> list[Any]:
    """Requests with enough to generate for all rounds, whose prompts are read."""
    lengths = [len(each.prompt) for each in batch]
    tokens = tokens_of(lengths, engine.config.prefill_tokens, engine.dispatcher.deepest)
    room = max(1, engine.target.max_positions - tokens)
    requests = [
        engine.add(each.prompt[-room:], replace(each.params, max_tokens=tokens, ignore_eos=True)) for each in batch
    ]
    while not all(request.generated or request.finish_reason for request in requests):
        engine.step()
    return requests


def _run(engine: Engine, rounds: int) -> None:
    for _ in range(rounds):
        engine.step()


def _seconds(engine: Engine, device: str) -> float:
    """Of `ROUNDS` rounds, without a profiler."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    _run(engine, ROUNDS)
    wait()
    return time.perf_counter() - started


@contextmanager
def _named_stages(engine: Engine) -> Iterator[None]:
    """Meanwhile the engine's stages are ranges of the profile. They are patched in, so that no other round pays."""
    own = engine.stage_times.stage

    @contextmanager
    def named(name: str) -> Iterator[None]:
        with stage(name), own(name):
            yield

    with patch.object(engine.stage_times, "stage", named):
        yield
