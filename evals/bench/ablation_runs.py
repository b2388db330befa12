"""Training runs of the variants of an ablation at equal time: a step is timed, a draft is trained, and it answers.

Each result is a file that also says what it follows from; it is made once. A training that was stopped goes on. Knows
nothing of what the options do. Paper section 2.3; DESIGN section 3.8.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from eagle_train import distributed
from eagle_train.cli import compose
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, Requests, SamplingParams, chain
from eagle_train.models.target import Target
from eagle_train.results import write_json
from eagle_train.settings import build
from eagle_train.training.assembly import assemble
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.lookahead import DRAWN_AHEAD
from eagle_train.training.trained_draft import read_trained
from evals.bench import statistics
from evals.bench.answering import answer_questions, batches_of
from evals.bench.config import check_decodes, check_least
from evals.bench.questions import Question
from evals.bench.requests import room_for
from evals.bench.worker import ALLOCATOR, Worker

BASE = "base"
DEPTH = 3  # of the chain

Found = dict[str, Any]


@dataclass
class AblationConfig:
    """conf/commands/ablations.yaml, which says what each key is. Raises UserError for values that cannot be."""

    base: list[str]
    steps: int
    seeds: list[int]
    only: list[str] | None
    variants: dict[str, list[str]]
    rounds: int
    timed_steps: int
    questions: str
    limit: int | None
    max_tokens: int
    batch_size: int
    device: str
    out: str

    def __post_init__(self) -> None:
        check_least(self, 1, "steps", "rounds", "timed_steps", "batch_size")
        check(len(self.seeds) > 0, "seeds=[]: give at least one")
        check_decodes(self.max_tokens)
        check(BASE not in self.variants, f"variants.{BASE}: it is the name of the run that all are compared with")
        self.variants = {BASE: [], **self.variants}
        for name in self.only or []:
            check(name in self.variants, f"only={self.only}: {name} is none of {', '.join(self.variants)}")
        self.params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)

    def overrides(self, name: str) -> list[str]:
        """A variant's overrides of eagle-train."""
        return [*self.base, *self.variants[name], f"device={self.device}"]


def kept(path: Path, asked: Found) -> Found | None:
    """The file's result where it follows from exactly `asked`; None where there is none."""
    if path.is_file() and (found := json.loads(path.read_text("utf-8")))["asked"] == asked:
        return found
    return None


def once(path: Path, asked: Found, make: Callable[[], Found]) -> Found:
    """The file's result where it follows from exactly `asked`; else it is made and written."""
    if (found := kept(path, asked)) is not None:
        return found
    made = {"asked": asked, **make()}
    write_json(path, made)
    return made


def timing_of(config: AblationConfig, name: str) -> Found:
    """What the time of a variant's step follows from."""
    return {"overrides": config.overrides(name), "rounds": config.rounds, "timed_steps": config.timed_steps}


def cost(config: AblationConfig, name: str) -> Found:
    """`ratio`: a variant's step time divided by the base's, the median of the rounds; `interval`: its 95 % interval,
    None for fewer than 6 rounds; and the seconds of both."""
    if name == BASE:
        return {"ratio": 1.0, "interval": None}
    workers = {which: Worker(train_steps, config.overrides(which)) for which in (BASE, name)}
    rounds = []
    for number in range(config.rounds + 1):
        order = list(workers) if number % 2 else list(workers)[::-1]
        seconds = {which: workers[which].ask(config.timed_steps) for which in order}
        rounds.append({which: median(seconds[which]) for which in workers})
    for worker in workers.values():
        worker.close()
    del rounds[0]  # a warm-up: caches, compiled kernels, the optimiser's state
    ratios = [each[name] / each[BASE] for each in rounds]
    return {
        "ratio": median(ratios),
        "interval": statistics.median_interval(ratios),
        "base_s": median(each[BASE] for each in rounds),
        "step_s": median(each[name] for each in rounds),
    }


def train_steps(overrides: list[str], line: Connection) -> None:
    """A worker process: makes a trainer; on each order trains so many steps and sends the seconds of each.

    More steps come before them that are not counted: their hidden states were computed while the other process ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = compose("train", [*overrides, f"out={folder}/out", "train.steps=1000000"])
        parallel = build(ParallelConfig, config.parallel, "parallel")
        trainer = assemble(config, parallel, distributed.start(resolve_device(config.device)))
    trainer.lookahead.start(steps=None)
    while (number := line.recv()) is not None:
        seconds = []
        for _ in range(DRAWN_AHEAD + number):
            started = time.perf_counter()
            trainer.train_step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        line.send(seconds[DRAWN_AHEAD:])


def run_of(config: AblationConfig, name: str, seed: int) -> Found | None:
    """What a run follows from: `training`, eagle-train's overrides for as many steps as take the base's time, and the
    questions. None where the variant has not been timed.
    """
    timed = kept(Path(config.out) / f"step-{name}.json", timing_of(config, name))
    if timed is None:
        return None
    low, high = timed["interval"] or (timed["ratio"], timed["ratio"])
    ratio = 1.0 if low <= 1 <= high else timed["ratio"]
    steps = max(1, round(config.steps / ratio))
    given = [f"seed={seed}", f"train.steps={steps}"]
    questions = {key: getattr(config, key) for key in ("questions", "limit", "max_tokens")}
    training = {"overrides": [*config.overrides(name), *given], "steps": steps}
    return {"name": f"{name}-{seed}", "training": training, **questions}


def run(asked: Found, target: Target, questions: list[Question], config: AblationConfig, longest: int) -> Found:
    """Train a draft and let it answer. Raises UserError where either fails; the training is kept until its draft has
    answered, and is used for other questions too. `longest`: the most tokens of a prompt and its answer."""
    folder = Path(config.out) / "training" / asked["name"]
    if kept(folder / "asked.json", asked["training"]) is None:
        shutil.rmtree(folder, ignore_errors=True)
        once(folder / "asked.json", asked["training"], dict)  # a stopped training goes on from its checkpoint
    given = [
        *asked["training"]["overrides"],
        f"out={folder}",
        "train.save_every=0",
        "train.eval_every=0",
        "train.resume=true",
    ]
    environment = {"GLIBC_TUNABLES": ALLOCATOR} | os.environ
    ended = subprocess.run([sys.executable, "-m", "eagle_train.train", *given], env=environment).returncode
    check(ended == 0, f"{asked['name']}: eagle-train ended with status {ended}; its output is above")
    checkpoint, draft = read_trained(folder)
    same = checkpoint.state["target"]["fingerprint"] == target.identity.fingerprint
    check(same, f"{asked['name']}: trained for another target than {BASE}; variants share one")
    found = {"tokens": checkpoint.state["tokens"], "parameters": draft.num_parameters}
    tree, rows = chain(DEPTH), config.batch_size
    engine = Engine(target, draft, tree, max_batch_size=rows, kv_tokens=room_for(rows, longest, tree))
    found |= answered(engine, questions, config)
    shutil.rmtree(folder)
    return found


def answered(engine: Engine, questions: list[Question], config: AblationConfig) -> Found:
    """TPC and acceptance over the questions; tokens and calls of each answer, by which two drafts are compared."""
    requests, answers = Requests(engine.target), []
    for batch in batches_of(questions, config.batch_size):
        for turn in answer_questions(engine, requests, batch, config.params):
            answers += turn
    return {
        "tpc": statistics.tpc(answers),
        "acceptance_per_depth": statistics.acceptance(answers),
        "answers": [[answer.output.stats.tokens, answer.output.stats.calls] for answer in answers],
    }


def finished(config: AblationConfig, name: str) -> dict[int, Found]:
    """A variant's runs so far, by seed."""
    runs = {}
    for seed in config.seeds:
        asked = run_of(config, name, seed)
        if asked and (done := kept(Path(config.out) / f"{name}-{seed}.json", asked)):
            runs[seed] = done
    return runs


def summed(config: AblationConfig, name: str, runs: dict[str, dict[int, Found]]) -> Found:
    """A variant's figures over its seeds, and its gain over the base on the seeds that both have."""
    own, base = runs[name], runs.get(BASE, {})
    timed = kept(Path(config.out) / f"step-{name}.json", timing_of(config, name))
    assert timed is not None  # `run_of` has no run of a variant that was not timed
    both = [seed for seed in own if seed in base]
    depths = zip(*(one["acceptance_per_depth"] for one in own.values()), strict=True)
    first = next(iter(own.values()))
    return {
        "overrides": config.variants[name],
        "parameters": first["parameters"],
        "step_time": {key: value for key, value in timed.items() if key != "asked"},
        "steps": first["asked"]["training"]["steps"],
        "tpc": fmean(one["tpc"] for one in own.values()),
        "tpc_by_seed": {seed: one["tpc"] for seed, one in own.items()},
        "acceptance_per_depth": [fmean(depth) for depth in depths],
        "gain": _gain(own, base, both) if both and name != BASE else None,
    }


def _gain(own: dict[int, Found], base: dict[int, Found], seeds: list[int]) -> dict[str, float]:
    ours, theirs = ([runs[seed]["answers"] for seed in seeds] for runs in (own, base))
    return statistics.tpc_gain(ours, theirs)
