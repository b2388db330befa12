"""How long tokens take: over batch sizes, contexts and trees, against plain decoding and `transformers.generate`.

All who are compared answer the same batches in turn, so that whatever else the machine does hits all alike; where the
time of a round goes is watched afterwards, on rounds of its own. Paper sections 2.4, 3.3 and figure 4b; DESIGN sections
3.8 and 3.10. Knows nothing of how prompts and answers come about, nor of a report's looks.

    python -m evals.latency draft=DIR batch_sizes=[1,2,4] context_lengths=[512,1024] trees=[chain3] out=DIR
    python -m evals.latency shapes=llama3_1_8b acceptance=[0.8,0.65,0.55] context_lengths=[2048] out=DIR
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.artifacts.format import load_draft, read_artifact
from eagle_train.cli import command
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, Output, SamplingParams
from eagle_train.inference.decode.dispatcher import Dispatcher
from eagle_train.inference.decode.graphs import check_graphs
from eagle_train.inference.drafters.drafter import check_drafting
from eagle_train.inference.drafters.eagle import ALIGNMENTS, Eagle
from eagle_train.inference.requests.readable import chats
from eagle_train.inference.requests.sequence import is_whole
from eagle_train.models.draft import Draft
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.quantised import Quant, quantised
from eagle_train.models.target import Target
from eagle_train.progress import progress
from eagle_train.results import prepared, provenance, redact, write_json, write_text
from eagle_train.settings import build
from evals import figures, latency_report
from evals.contenders import Transformers, as_it_comes, serve
from evals.figures import Answer, Together
from evals.mt_bench import labels
from evals.prompts import Asked, Prompts, arriving
from evals.questions import read_questions
from evals.shapes import ShapesConfig, ToldEngine, models_of
from evals.stopwatch import breakdown

PLAIN, TRANSFORMERS, LOOKUP = "plain", "transformers", "transformers, prompt lookup"
WATCHED = 8  # batches of a cell, at most, over which a breakdown is taken
Answering = Callable[[Sequence[Asked]], list[Output]]


@dataclass
class Artifact:
    """`path`: a directory that eagle-export wrote; None with shapes. `alignment`: see inference/drafters/eagle.py."""

    path: str | None
    alignment: str

    def __post_init__(self) -> None:
        check(self.alignment in ALIGNMENTS, f"draft.alignment={self.alignment}: must be {' or '.join(ALIGNMENTS)}")


@dataclass
class Config:
    """conf/commands/latency.yaml, which says what each key is. Raises UserError for values that cannot be."""

    draft: Artifact
    acceptance: list[float] | None
    batch_sizes: list[int]
    context_lengths: list[int] | None
    trees: list[str]
    quants: list[str]
    questions: str | None
    repeats: int
    rate: float | None
    requests: int
    out: str
    max_tokens: int
    ignore_eos: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int
    prompt_lookup: int
    drafting: str
    compile: bool
    graphs: bool
    device: str
    threads: int | None
    target: TargetConfig | None = None
    shapes: ShapesConfig | None = None

    def __post_init__(self) -> None:
        for key in ("repeats", "requests", "prompt_lookup"):
            check(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: must be at least 1")
        check(self.max_tokens >= 2, f"max_tokens={self.max_tokens}: must be at least 2, for there to be decoding")
        check(self.threads is None or self.threads >= 1, f"threads={self.threads}: must be at least 1, or null")
        check(self.rate is None or self.rate > 0, f"rate={self.rate}: must be above 0, or null")
        for key in ("batch_sizes", "context_lengths"):
            sizes = [1] if getattr(self, key) is None else getattr(self, key)
            right = bool(sizes) and all(is_whole(size, 1) for size in sizes)
            check(right, f"{key}={sizes}: must be numbers from 1 on")
        check(bool(self.quants), "quants=[]: must name none, int4 or fp8")
        check_drafting(self.drafting)
        self.check_models()
        random = self.questions is None and self.context_lengths is None
        check(not random, "context_lengths is needed: random tokens have no length of their own; give [512], say")
        self.params = SamplingParams(
            self.temperature, self.top_p, self.top_k, self.max_tokens, self.seed, ignore_eos=self.ignore_eos
        )

    @property
    def drafters(self) -> dict[str, tuple[str, Quant]]:
        """Trees, or tables of them, and quantised drafts, each with each, by the names they have in the report."""
        pairs = [(tree, Quant(scheme)) for tree in self.trees for scheme in self.quants]
        names = [tree if quant.scheme == "none" else f"{tree} {quant.scheme}" for tree, quant in pairs]
        return dict(zip(names, pairs, strict=True))

    @property
    def files(self) -> list[str]:
        """Those of `trees` that are files."""
        return [tree for tree in self.trees if tree.endswith(".yaml")]

    def check_models(self) -> None:
        """A checkpoint and a draft, or shapes and what they are to accept; and trees that draft."""
        deepest = [Dispatcher(tree).deepest for tree, _ in self.drafters.values()]
        check(
            min(deepest, default=0) > 0, f"trees={self.trees}: must be trees that draft; plain decoding is always there"
        )
        if self.shapes is None:
            check(self.target is not None and self.draft.path is not None, "draft is needed: give draft=DIR, or shapes")
            check(self.acceptance is None, f"acceptance={self.acceptance}: needs shapes; a real draft has its own")
            return
        for name, value in (("target", self.target), ("draft.path", self.draft.path), ("questions", self.questions)):
            check(value is None, f"{name}: leave it out with shapes, whose weights and prompts are random")
        shares = self.acceptance or []
        told = len(shares) >= max(deepest) and sorted(shares, reverse=True) == shares
        check(
            told and all(0 <= share <= 1 for share in shares),
            f"acceptance={self.acceptance}: must be {max(deepest)} shares, by depth, none above the one before; "
            f"one of trees={self.trees} is so deep",
        )


@dataclass(frozen=True)
class Cell:
    """A point of the sweep. `context_length`: None where the questions are as they are."""

    batch_size: int
    context_length: int | None


@dataclass
class Bench:
    """The models, and who decodes with them."""

    config: Config
    target: Target
    draft: Draft

    def __post_init__(self) -> None:
        self.model, self.plain = as_it_comes(self.target), Engine(self.target, max_batch_size=1)
        self.prompts = Prompts(self.plain, self.config.questions, self.config.params)

    def engines(self, batch_size: int) -> dict[str, Engine]:
        """Plain decoding's, and one for each tree and quantised draft."""
        options = {name: getattr(self.config, name) for name in ("drafting", "compile", "graphs")}
        options["max_batch_size"] = batch_size
        engines = {PLAIN: Engine(self.target, **options)}
        told = self.config.acceptance
        make = Engine if told is None else partial(ToldEngine, told)
        for name, (tree, quant) in self.config.drafters.items():
            draft = quantised(copy.deepcopy(self.draft), quant)  # before an engine rounds it
            drafter = Eagle(draft, self.target, self.config.draft.alignment)
            engines[name] = make(self.target, drafter, tree, **options)
        return engines

    def others(self, batch: list[Asked]) -> dict[str, Transformers]:
        """transformers, with the threads that suit it for such a batch; its prompt lookup is for a single prompt."""
        stops = self.plain.requests.stop_ids
        found = {TRANSFORMERS: Transformers(self.model, stops)}
        if len(batch) == 1:
            found[LOOKUP] = Transformers(self.model, stops, self.config.prompt_lookup)
        for other in found.values():
            other.tune(batch)
        return found


@command("latency")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    device = resolve_device(config.device)
    check_graphs(config.graphs, device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    # Whatever can be wrong is told before the target is loaded.
    source = None if config.draft.path is None else read_artifact(config.draft.path).source
    if config.questions is not None:
        read_questions(config.questions)
    out = prepared(config.out)
    target, draft = models(config, device)
    about = {
        "draft_source": source,
        "target": target.name if config.shapes is None else described(target),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": target.device.type,
        "tables": {path: labels(Dispatcher(path), max(config.batch_sizes)) for path in config.files},
        "config": redact(OmegaConf.to_container(values)),
    }
    for cells in swept(Bench(config, target, draft)):  # each is written when it is there: a later one may fail
        found = {**cells, **about, "provenance": provenance()}
        write_text(out / "report.md", latency_report.markdown(found))
        write_json(out / "results.json", found)
    print(latency_report.summary(found))
    print(f"written to {out}: report.md, results.json")


def models(config: Config, device: str) -> tuple[Target, Draft]:
    if config.shapes is not None:
        return models_of(config.shapes, device, config.seed)
    target = load_target(config.target, device, reads=None if config.questions is None else chats)
    return target, load_draft(config.draft.path, target.identity)


def described(target: Target) -> str:
    """A target without a name."""
    size = sum(parameter.numel() for parameter in target.model.parameters())
    number = f"{size / 1e9:.3g} billion" if size >= 1e9 else f"{size / 1e6:.3g} million"
    return f"a random {target.config.model_type} of {number} parameters"


def swept(bench: Bench) -> Iterator[dict[str, Any]]:
    """A row for each cell and contender, the breakdown of each cell and engine, and the first tree's figures on top:
    after each cell those so far. What cannot be asked is refused before the first."""
    config, prompts = bench.config, bench.prompts
    cells = [Cell(size, length) for size in config.batch_sizes for length in config.context_lengths or [None]]
    fixed = [prompts.batches(config.repeats, cell.batch_size, cell.context_length) for cell in cells]
    coming = [[] for _ in cells]
    if config.rate is not None:
        coming = [prompts.batches(config.repeats, config.requests, cell.context_length) for cell in cells]
        coming = [arriving(batches, config.rate, config.seed) for batches in coming]
    rows, breakdowns = [], []
    bar, asked = progress(sum(map(len, (*fixed, *coming))), "batch"), 0
    for number, (cell, batches, arrivals) in enumerate(zip(cells, fixed, coming, strict=True), 1):
        engines = bench.engines(cell.batch_size)
        serving = {name: partial(serve, engine) for name, engine in engines.items()}
        others = bench.others(batches[0])
        answered = take_turns(serving | others, batches, told=lambda done, before=asked: bar.update(before + done))
        asked += len(batches)
        threads = {name: other.threads for name, other in others.items() if bench.target.device.type == "cpu"}
        rows += rows_of(config, cell, answered, batches, threads)
        if arrivals:
            played = take_turns(serving, arrivals, told=lambda done, before=asked: bar.update(before + done))
            asked += len(arrivals)
            rows += rows_of(config, cell, played, arrivals)
        pairs = zip(batches, answered[PLAIN], strict=True)
        watched = [batch for batch, theirs in pairs if figures.intervals(theirs)]  # they have rounds, whoever drafts
        watched = watched[:: -(-len(watched) // WATCHED)]
        for name, engine in engines.items():
            breakdowns.append({**asdict(cell), "decoding": name, **breakdown(engine, watched)})
        top = headline(rows, breakdowns, next(iter(config.drafters)))
        yield {**top, "rows": rows, "breakdown": breakdowns, "cells": {"measured": number, "of": len(cells)}}
    bar.close()


def take_turns(
    contenders: dict[str, Answering],
    batches: list[list[Asked]],
    warm_up: int = 1,
    told: Callable[[int], None] = lambda done: None,
) -> dict[str, list[Together]]:
    """Everyone's answers to every batch, after the first `warm_up` to warm up; with every batch another one begins.

    `told`: how many batches have been answered, after each.
    """
    for answering in contenders.values():
        for batch in batches[:warm_up]:
            answering(batch)
    answered: dict[str, list[Together]] = {name: [] for name in contenders}
    names = list(contenders)
    for number, batch in enumerate(batches):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            pairs = zip(batch, contenders[name](batch), strict=True)
            answered[name].append([Answer(each.question, 1, each.prompt, output) for each, output in pairs])
        told(number + 1)
    return answered


def rows_of(
    config: Config,
    cell: Cell,
    answered: dict[str, list[Together]],
    batches: list[list[Asked]],
    threads: Mapping[str, int] | None = None,
) -> list[dict[str, Any]]:
    """A row for each contender; `threads`: of those whose number was tuned. Raises UserError where the speed-up of
    single prompts exceeds tokens per call."""
    at = [[each.arrival for each in batch] for batch in batches]
    speeds = {name: list(map(figures.tokens_per_s, answered[name], at)) for name in answered}
    poisson = any(chain.from_iterable(at))
    rows = []
    for name, theirs in answered.items():
        answers = list(chain.from_iterable(theirs))
        found = {
            **asdict(cell),
            "arrivals": "poisson" if poisson else "together",
            "decoding": name,
            "tpc": figures.tpc(answers),
            "acceptance_per_depth": figures.acceptance(answers),
            **figures.compare(answered[PLAIN], theirs),  # first, as it says so where nobody decoded
            **figures.times(answers),
            "tokens_per_s": statistics.median(speeds[name]),
            "over": {other: median_ratio(speeds[name], speeds[other]) for other in answered if other != name},
            "answers": len(answers),
            "threads": (threads or {}).get(name),
        }
        own_draws = name in config.drafters and config.drafting != "greedy"  # or transformers' own
        if config.acceptance is not None or (config.temperature > 0 and (own_draws or name in (TRANSFORMERS, LOOKUP))):
            found["differing_answers"] = None  # samples may well differ, and so may what is told
        drafts = bool(found["acceptance_per_depth"])  # a table may say that nothing is drafted at this size
        if name in config.drafters and drafts and cell.batch_size == 1 and not poisson:
            figures.check_timing(found)
        rows.append(found)
    return rows


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the batches' ratios, which a disturbance of a few batches leaves alone."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def headline(rows: list[dict[str, Any]], breakdowns: list[dict[str, Any]], tree: str) -> dict[str, Any]:
    """The first tree's figures in the first cell, as evals.mt_bench tells them. DESIGN section 3.10."""
    own, plain = (next(row for row in rows if row["decoding"] == name) for name in (tree, PLAIN))
    stages = next(each for each in breakdowns if each["decoding"] == tree)
    keys = ("tpc", "acceptance_per_depth", "speedup", "speedup_batch_median", "differing_answers")
    times = [key for key in own if key.startswith(("ttft", "ttit"))]
    return {
        "tree": tree,
        **{key: own[key] for key in (*keys, *times)},
        **{f"plain_{key}": plain[key] for key in times},
        "draft_latency_ms": stages["draft_latency_ms"],
        "outside": stages["outside"],
    }


if __name__ == "__main__":
    main()
