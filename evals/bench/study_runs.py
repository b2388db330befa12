"""How an experiment comes by its drafts: a step is timed, drafts are trained, or one is given.

Each result is a file that also says what it follows from; it is made once. A training that was stopped goes on. Knows
nothing of what the variants are, and of decoding. DESIGN section 3.8.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eagle_train import distributed
from eagle_train.artifacts.format import load_draft, read_artifact, save_draft
from eagle_train.cli import as_overrides, compose
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.models.target import Target
from eagle_train.results import write_json
from eagle_train.settings import build
from eagle_train.training.assembly import assemble
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.lookahead import DRAWN_AHEAD
from eagle_train.training.trained_draft import read_trained
from evals.bench import statistics
from evals.bench.study import StudyConfig, Trained
from evals.bench.worker import ALLOCATOR, Worker

Found = dict[str, Any]
_EAGLE_TRAIN = "from eagle_train.commands import train; train()"  # the command as it is installed


def kept(path: Path, asked: Found, figures: Collection[str] = ()) -> Found | None:
    """The file's result where it follows from exactly `asked`, and has these figures, which an earlier version may not
    have written; None where there is none."""
    found: Found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found if found.get("asked") == asked and found.keys() >= set(figures) else None


def once(path: Path, asked: Found, make: Callable[[], Found], figures: Collection[str] = ()) -> Found:
    """The file's result where it follows from exactly `asked` and has these figures; else it is made and written."""
    if (found := kept(path, asked, figures)) is not None:
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
    reference = config.trained_as(config.study.reference)
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
        given = as_overrides("train", [*overrides, f"out={folder}/out", "train.steps=1000000"])
        config = compose("train", given)
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
    """What a draft follows from: eagle-train's overrides, or the draft that is given; and the target."""
    if config.draft.path is not None:
        return {"draft": config.draft.path, "source": read_artifact(config.draft.path).source, "target": config.target}
    seeds = [f"seed={run.seed}", f"data.seed={run.seed}"]
    own = [*config.overrides(run.variant), *seeds, f"train.steps={run.steps}"]
    return {"overrides": own, "target": config.target}


def train(config: StudyConfig, run: Trained, target: Target) -> Found:
    """Train a draft and keep it in `drafts`; nothing of the kind where one is given. Raises UserError where that
    fails."""
    if config.draft.path is not None:
        draft = load_draft(config.draft.path, target.identity)
        return {"tokens": read_artifact(config.draft.path).training.get("tokens"), "parameters": draft.num_parameters}
    asked, folder = training_asked(config, run), Path(config.out) / "training" / str(run)
    if kept(folder / "asked.json", asked) is None:
        shutil.rmtree(folder, ignore_errors=True)
        once(folder / "asked.json", asked, dict)  # a stopped training goes on from its checkpoint
    given = [*asked["overrides"], f"out={folder}", "train.save_every=0", "train.eval_every=0", "train.resume=true"]
    environment = {"GLIBC_TUNABLES": ALLOCATOR} | os.environ
    ended = subprocess.run([sys.executable, "-c", _EAGLE_TRAIN, *given], env=environment).returncode
    check(ended == 0, f"{run}: eagle-train ended with status {ended}; its output is above")
    checkpoint, draft = read_trained(folder)
    same = checkpoint.state["target"]["fingerprint"] == target.identity.fingerprint
    check(same, f"{run}: trained for another target than the first variant; variants share one")
    tokens = checkpoint.state["tokens"]
    save_draft(draft, draft_of(config, run), target.identity, {"steps": run.steps, "tokens": tokens}, torch.float32)
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()
    return {"tokens": tokens, "parameters": draft.num_parameters}


def draft_of(config: StudyConfig, run: Trained) -> Path:
    """Where a draft is kept; variants that are trained alike share it."""
    return Path(config.draft.path or Path(config.out) / "drafts" / str(config.draft_run(run)))
