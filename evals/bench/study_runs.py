"""What an experiment does: a step is timed, drafts are trained, they answer for TPC, and in turn for the speed-up.

Each result is a file that also says what it follows from; it is made once. A training that was stopped goes on. Knows
nothing of what the variants are. DESIGN section 3.8.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eagle_train import distributed
from eagle_train.artifacts.format import load_draft, save_draft
from eagle_train.cli import compose
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, Requests
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.models.target import Target
from eagle_train.results import write_json
from eagle_train.settings import build
from eagle_train.training.assembly import assemble
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.lookahead import DRAWN_AHEAD
from eagle_train.training.trained_draft import read_trained
from evals.bench import statistics
from evals.bench.answering import Run, answer_questions, batches_of, run_in_turn
from evals.bench.questions import Question
from evals.bench.requests import room_for
from evals.bench.study import StudyConfig, Trained
from evals.bench.worker import ALLOCATOR, Worker

Found = dict[str, Any]


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


# --- the time of a step


def timing_asked(config: StudyConfig, name: str) -> Found:
    """What the time of a variant's step follows from."""
    reference = config.overrides(config.study.reference)
    own = {"overrides": config.overrides(name), "reference": reference}
    return own | {"rounds": config.rounds, "timed_steps": config.timed_steps}


def cost(config: StudyConfig, name: str) -> Found:
    """`ratio`: a variant's step time divided by the reference's, the median of the rounds; `interval`: its 95 %
    interval, None for fewer than 6 rounds; and the seconds of both."""
    reference = config.study.reference
    workers = {which: Worker(train_steps, config.overrides(which)) for which in dict.fromkeys((reference, name))}
    rounds = []
    for number in range(config.rounds + 1):
        order = list(workers) if number % 2 else list(workers)[::-1]
        seconds = {which: workers[which].ask(config.timed_steps) for which in order}
        rounds.append({which: median(seconds[which]) for which in workers})
    for worker in workers.values():
        worker.close()
    del rounds[0]  # a warm-up: caches, compiled kernels, the optimiser's state
    ratios = [each[name] / each[reference] for each in rounds]
    return {
        "ratio": median(ratios),
        "interval": None if name == reference else statistics.median_interval(ratios),
        "reference_s": median(each[reference] for each in rounds),
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


# --- training


def training_asked(config: StudyConfig, run: Trained) -> Found:
    """What a draft follows from: eagle-train's overrides."""
    return {"overrides": [*config.overrides(run.variant), f"seed={run.seed}", f"train.steps={run.steps}"]}


def train(config: StudyConfig, run: Trained, target: Target) -> Found:
    """Train a draft and keep it in `drafts`. Raises UserError where that fails."""
    asked, folder = training_asked(config, run), Path(config.out) / "training" / str(run)
    if kept(folder / "asked.json", asked) is None:
        shutil.rmtree(folder, ignore_errors=True)
        once(folder / "asked.json", asked, dict)  # a stopped training goes on from its checkpoint
    given = [*asked["overrides"], f"out={folder}", "train.save_every=0", "train.eval_every=0", "train.resume=true"]
    environment = {"GLIBC_TUNABLES": ALLOCATOR} | os.environ
    ended = subprocess.run([sys.executable, "-m", "eagle_train.train", *given], env=environment).returncode
    check(ended == 0, f"{run}: eagle-train ended with status {ended}; its output is above")
    checkpoint, draft = read_trained(folder)
    same = checkpoint.state["target"]["fingerprint"] == target.identity.fingerprint
    check(same, f"{run}: trained for another target than the first variant; variants share one")
    save_draft(draft, draft_of(config, run), target.identity, dtype=torch.float32)
    shutil.rmtree(folder)
    return {"tokens": checkpoint.state["tokens"], "parameters": draft.num_parameters}


def draft_of(config: StudyConfig, run: Trained) -> Path:
    """Where a trained draft is kept."""
    return Path(config.out) / "drafts" / str(run)


# --- tokens per call


def answers_asked(config: StudyConfig, run: Trained, tree: str) -> Found:
    """What the answers with a draft and a tree follow from."""
    questions = {key: getattr(config, key) for key in ("questions", "limit", "max_tokens")}
    return {"training": training_asked(config, run), "tree": config.study.trees[tree], **questions}


def answered(
    config: StudyConfig, run: Trained, tree: str, target: Target, questions: list[Question], longest: int
) -> Found:
    """TPC and acceptance over the questions; tokens and calls of each answer, by which drafts are compared, and the
    seconds that it took. `longest`: the most tokens of a prompt and its answer."""
    rows, started = config.batch_size, time.perf_counter()
    engine = engine_of(config, run, tree, target, rows, longest)
    requests, answers = Requests(target), []
    for batch in batches_of(questions, rows):
        answers += list(chain.from_iterable(answer_questions(engine, requests, batch, config.params)))
    return {
        "tpc": statistics.decoded_tpc(answers),
        "acceptance_per_depth": statistics.acceptance(answers),
        "answers": [[answer.output.stats.tokens, answer.output.stats.calls] for answer in answers],
        "seconds": time.perf_counter() - started,
    }


def engine_of(config: StudyConfig, run: Trained, tree: str, target: Target, rows: int, longest: int) -> Engine:
    """An engine with a trained draft."""
    drafter = drafter_of(load_draft(draft_of(config, run), target.identity), target)
    spec = config.study.trees[tree]
    return Engine(target, drafter, spec, max_batch_size=rows, kv_tokens=room_for(rows, longest, spec))


# --- speed


def speed_asked(config: StudyConfig, runs: Mapping[str, Trained]) -> Found:
    """What the speed-ups follow from."""
    answers = {name: [answers_asked(config, run, tree) for tree in config.study.trees] for name, run in runs.items()}
    return {"answers": answers, "timed_questions": config.timed_questions}


def speed(
    config: StudyConfig, runs: Mapping[str, Trained], target: Target, questions: list[Question], longest: int
) -> Found:
    """The speed-up over plain decoding of each variant's draft with each tree, single prompts, all in turn.

    Raises UserError where one exceeds its TPC.
    """
    count = min(config.timed_questions, len(questions))
    asked = [questions[place * len(questions) // count] for place in range(count)]
    requests = Requests(target)
    plain = Run(Engine(target, max_batch_size=1, kv_tokens=room_for(1, longest, "chain1")), requests)
    pairs = [(name, tree) for name in runs for tree in config.study.trees]
    others = [Run(engine_of(config, runs[name], tree, target, 1, longest), requests) for name, tree in pairs]
    run_in_turn([plain, *others], asked, config.params, 1)
    found: Found = {name: {} for name in runs}
    for (name, tree), other in zip(pairs, others, strict=True):
        measured = statistics.compare(plain.batches, other.batches)
        measured |= {"tpc": statistics.decoded_tpc(other.answers)}
        statistics.check_timing(measured)
        measured["interval"] = statistics.speedup_interval(plain.batches, other.batches)
        found[name][tree] = measured
    return {"speedups": found}
