"""Latency over batch sizes and contexts: a row per cell and variant, and where the time of each engine's rounds goes.

Knows nothing of how variants are made or how rows are shown. Paper sections 2.4 and 3.3; DESIGN sections 3.8, 3.10.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

from eagle_train.distributed import ALONE, World
from eagle_train.errors import UserError, check
from eagle_train.inference import Engine
from eagle_train.inference.drafters import drafter_name
from eagle_train.models.draft_quantisation import Quant
from eagle_train.progress import Progress, progress
from evals.bench import statistics
from evals.bench.answering import Answering, serve, take_turns, warm_up
from evals.bench.baselines import Transformers
from evals.bench.config import DrafterConfig, check_decodes, check_least, check_sizes
from evals.bench.growth import growth
from evals.bench.requests import PromptSource, TimedRequest, with_arrivals
from evals.bench.stage_clock import breakdown
from evals.bench.statistics import AnswerBatch

PLAIN, TRANSFORMERS, LOOKUP = "plain", "transformers", "transformers, prompt lookup"
BREAKDOWN_BATCHES = 8  # of a cell, at most
WINDOWS = 24  # of the time that arrivals take, in each of which TTIT is told
Rows = list[dict[str, Any]]
Batch = list[TimedRequest]


@dataclass(kw_only=True)
class SweepConfig(DrafterConfig):
    """The keys of conf/commands/latency.yaml that say what is swept. Raises UserError for values that cannot be."""

    acceptance: list[float] | None
    batch_sizes: list[int]
    context_lengths: list[int] | None
    trees: list[str]
    quants: list[str]
    repeats: int
    rate: float | None
    requests: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "repeats", "requests")
        check_decodes(self.max_tokens)
        check(self.rate is None or self.rate > 0, f"rate={self.rate}: must be above 0, or null")
        check_sizes("batch_sizes", self.batch_sizes)
        check_sizes("context_lengths", [1] if self.context_lengths is None else self.context_lengths)
        check(bool(self.quants), "quants=[]: must name none, int4 or fp8")

    @property
    def drafters(self) -> dict[str, tuple[str, Quant]]:
        """Each tree, or table of trees, with each quantisation of the draft, by their names in the report."""
        pairs = [(tree, Quant(scheme)) for tree in self.trees for scheme in self.quants]
        names = [tree if quant.scheme == "none" else f"{tree} {quant.scheme}" for tree, quant in pairs]
        names = names if self.is_eagle else [f"{drafter_name(self.spec)} {name}" for name in names]
        return dict(zip(names, pairs, strict=True))


@dataclass(frozen=True)
class Cell:
    """A point of the sweep. `context_length`: None where the questions are as they are."""

    batch_size: int
    context_length: int | None


@dataclass(frozen=True)
class Variants:
    """What is compared in a cell. `engines`: by a batch size, plain decoding's (`PLAIN`) and the drafters'.
    `baselines`: by a batch, transformers' tuned for it."""

    engines: Callable[[int], dict[str, Engine]]
    baselines: Callable[[Batch], dict[str, Transformers]]


def sweep(
    config: SweepConfig, prompts: PromptSource, variants: Variants, world: World = ALONE
) -> Iterator[dict[str, Any]]:
    """After each cell, what results.json says so far: a row for each cell and variant, how times grow, the breakdown of
    each engine's rounds, `left_out`, see `checked`, and the first tree's figures on top. `world`: the ranks that hold
    the target together; what is left out follows from the first one's times. Raises UserError, before the first cell,
    for prompts that do not fit."""
    cells = cells_of(config)
    fixed = [prompts.batches(config.repeats, cell.batch_size, cell.context_length) for cell in cells]
    arriving: list[list[Batch]] = [[] for _ in cells]
    if config.rate is not None:
        arriving = [prompts.batches(config.repeats, config.requests, cell.context_length) for cell in cells]
        arriving = [with_arrivals(batches, config.rate, config.seed) for batches in arriving]
    rows, breakdowns, left_out = Rows(), Rows(), list[str]()
    bar, done = progress(sum(map(len, (*fixed, *arriving))), "batch"), 0
    for number, (cell, batches, arrivals) in enumerate(zip(cells, fixed, arriving, strict=True), 1):
        engines = variants.engines(cell.batch_size)
        serving: dict[str, Answering] = {name: partial(serve, engine) for name, engine in engines.items()}
        baselines = variants.baselines(batches[0])
        everybody: dict[str, Answering] = {**serving, **baselines}
        warm_up(everybody, batches[0])
        answered = take_turns(everybody, batches, 0, partial(_advance, bar, done))
        done += len(batches)
        own = rows_of(config, cell, answered, batches, threads_of(baselines))
        found, wrong = checked(config, cell, world.agreed(own))  # ranks' clocks differ
        rows += found
        left_out += wrong
        if arrivals:
            played = take_turns(serving, arrivals, on_batch=partial(_advance, bar, done))
            done += len(arrivals)
            rows += rows_of(config, cell, played, arrivals)
        some = with_rounds(batches, answered[PLAIN])
        breakdowns += [
            {**asdict(cell), "decoding": name, **breakdown(engine, some)} for name, engine in engines.items()
        ]
        top = headline(rows, breakdowns, next(iter(config.drafters)))
        together = [row for row in rows if row["arrivals"] == "together"]
        measured = {"rows": rows, "growth": growth(together), "breakdown": breakdowns, "left_out": left_out}
        yield {**top, **measured, "cells": {"measured": number, "of": len(cells)}}
    bar.close()


def cells_of(config: SweepConfig) -> list[Cell]:
    """All points, in the order in which they are measured."""
    lengths: list[int | None] = [None] if config.context_lengths is None else [*config.context_lengths]
    return [Cell(size, length) for size in config.batch_sizes for length in lengths]


def _advance(bar: Progress, before: int, done: int) -> None:
    bar.update(before + done)


def threads_of(baselines: Mapping[str, Transformers]) -> dict[str, int]:
    """The threads of a CPU that each was tuned to."""
    return {name: one.threads for name, one in baselines.items() if one.model.device.type == "cpu"}


def with_rounds(batches: list[Batch], plain: list[AnswerBatch]) -> list[Batch]:
    """Batches for a breakdown, taken evenly from those in which plain decoding, and so any other, has rounds."""
    some = [batch for batch, answers in zip(batches, plain, strict=True) if statistics.intervals(answers)]
    return some[:: -(-len(some) // BREAKDOWN_BATCHES)]


def rows_of(
    config: SweepConfig,
    cell: Cell,
    answered: dict[str, list[AnswerBatch]],
    batches: list[Batch],
    threads: Mapping[str, int] | None = None,
) -> Rows:
    """A row for each variant; `threads`: of those that were tuned. Raises UserError where nothing was decoded."""
    at = [[each.arrival for each in batch] for batch in batches]
    speeds = {name: list(map(statistics.tokens_per_s, answered[name], at)) for name in answered}
    poisson = any(chain.from_iterable(at))
    ends = [max(statistics.ends_of(*pair)) for theirs in answered.values() for pair in zip(theirs, at, strict=True)]
    window = max(ends) / WINDOWS
    rows = []
    for name, theirs in answered.items():
        answers = list(chain.from_iterable(theirs))
        found = {
            **asdict(cell),
            "arrivals": "poisson" if poisson else "together",
            "decoding": name,
            "tpc": statistics.tpc(answers),
            "tpc_interval": statistics.question_interval(statistics.by_question(answers)),
            "acceptance_per_depth": statistics.acceptance(answers),
            # Before the times: it raises where nothing was decoded.
            **statistics.compare(answered[PLAIN], theirs, config.max_tokens),
            "speedup_interval": statistics.speedup_interval(answered[PLAIN], theirs),
            **statistics.times(answers),
            "tokens_per_s": median(speeds[name]),
            "over": {
                other: statistics.median_ratio(speeds[name], speeds[other]) for other in answered if other != name
            },
            "answers": len(answers),
            "distinct_prompts": statistics.distinct_prompts(answers),
            "looping_answers": 0.0 if config.acceptance else statistics.looping(statistics.token_ids(answers)),
            "threads": (threads or {}).get(name),
        }
        if poisson:
            found |= {"window_s": window, "ttit_over_time_s": statistics.ttit_over_time(theirs, at, window)}
        found["lossy"] = any(answer.output.is_lossy for answer in answers) if name in config.drafters else False
        if may_differ(config, name):
            found["differing_answers"] = None
        rows.append(found)
    return rows


def checked(config: SweepConfig, cell: Cell, rows: Rows) -> tuple[Rows, list[str]]:
    """The rows of batches that come together, and why some are left out: see `statistics.check_timing`."""
    found, wrong = Rows(), list[str]()
    for row in rows:
        drafts = bool(row["acceptance_per_depth"])  # a table may draft nothing at this size
        if row["decoding"] in config.drafters and drafts and cell.batch_size == 1:
            try:
                statistics.check_timing(row)
            except UserError as error:  # the other rows stand, and took long to measure
                at = "" if cell.context_length is None else f", context {cell.context_length}"
                wrong.append(f"{row['decoding']}, batch size 1{at}: {error}")
                continue
        found.append(row)
    return found, wrong


def may_differ(config: SweepConfig, name: str) -> bool:
    """Whether a variant's answers may be other than plain decoding's: other samples, or simulated acceptance."""
    own_draws = name in config.drafters and config.options.drafting != "greedy"
    sampled = config.temperature > 0 and (own_draws or name in (TRANSFORMERS, LOOKUP))
    return config.acceptance is not None or sampled


def headline(rows: Rows, breakdowns: Rows, tree: str) -> dict[str, Any]:
    """The first tree's figures in the first cell, under the names of evals.mt_bench; None where its row is left out.
    DESIGN section 3.10."""
    plain = next(row for row in rows if row["decoding"] == PLAIN)
    cell = [plain[key] for key in ("batch_size", "context_length", "arrivals")]
    same = [row for row in rows if [row[key] for key in ("batch_size", "context_length", "arrivals")] == cell]
    own = next((row for row in same if row["decoding"] == tree), dict.fromkeys(plain))
    stages = next(each for each in breakdowns if each["decoding"] == tree)
    keys = ("tpc", "acceptance_per_depth", "speedup", "speedup_batch_median", "speedup_interval", "differing_answers")
    times = [key for key in plain if key.startswith(("ttft", "ttit"))]
    return {
        "tree": tree,
        **{key: own[key] for key in (*keys, *times)},
        **{f"plain_{key}": plain[key] for key in times},
        "draft_latency_ms": stages["draft_latency_ms"],
        "outside": stages["outside"],
    }
