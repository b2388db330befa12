"""What each option of the training is worth at equal time: tokens per call of drafts trained as long as the base's.

A variant's step is timed against the base's, each in a process of its own, in turn; by their ratio it gets fewer or
more steps, or as many where noise may be all of the difference. It is trained by eagle-train itself, and its draft
answers held-out questions. What is done lies in a file and is not done again, and a training that was stopped goes on,
so that variants can be run one at a time. Paper section 2.3; DESIGN section 3.8. Knows nothing of what the options do.

    python -m evals.ablations only=[base,unroll2] steps=280
    python -m evals.ablations "+variants.wider=['draft.intermediate_size=1536']" only=[base,wider]
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from eagle_train import distributed
from eagle_train.artifacts.markdown import aligned, code, plain
from eagle_train.cli import command, compose
from eagle_train.errors import UserError, check
from eagle_train.export import trained
from eagle_train.hardware import resolve_device
from eagle_train.inference import Engine, SamplingParams
from eagle_train.inference.decode.tree import chain
from eagle_train.inference.requests.readable import chats
from eagle_train.models.loading import TargetConfig, load_target
from eagle_train.models.target import Target
from eagle_train.results import prepared, provenance, write_json, write_text
from eagle_train.settings import build
from eagle_train.training.assembly import assemble
from eagle_train.training.backend import ParallelConfig
from eagle_train.training.lookahead import DRAWN_AHEAD
from evals import figures
from evals.mt_bench import ask, check_fit
from evals.questions import Question, read_questions
from evals.report import made_on, table
from evals.worker import ALLOCATOR, Worker

BASE = "base"
DEPTH = 3  # of the chain
RESAMPLES = 2000  # of the questions, for an interval

Found = dict[str, Any]


@dataclass
class Config:
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
        for key in ("steps", "rounds", "timed_steps", "batch_size"):
            check(getattr(self, key) >= 1, f"{key}={getattr(self, key)}: must be at least 1")
        check(len(self.seeds) > 0, "seeds=[]: give at least one")
        check(self.max_tokens >= 2, f"max_tokens={self.max_tokens}: must be at least 2, for there to be decoding")
        check(BASE not in self.variants, f"variants.{BASE}: it is the name of what all are compared to")
        self.variants = {BASE: [], **self.variants}
        for name in self.only or []:
            check(name in self.variants, f"only={self.only}: {name} is none of {', '.join(self.variants)}")
        self.params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)

    def overrides(self, name: str) -> list[str]:
        """A variant's, for eagle-train."""
        return [*self.base, *self.variants[name], f"device={self.device}"]


@command("ablations")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    chosen = config.only or list(config.variants)
    composed = {
        name: compose("train", config.overrides(name)) for name in [BASE, *chosen]
    }  # mistakes, before it starts
    questions = read_questions(config.questions, config.limit)
    out = prepared(config.out)
    given, device = build(TargetConfig, composed[BASE].target, "target"), resolve_device(config.device)
    target = load_target(given, device, reads=chats)
    check_fit(Engine(target), questions, config.max_tokens)
    for seed in config.seeds:
        for name in chosen:
            print(f"{name}, seed {seed}", flush=True)
            once(out / f"step-{name}.json", timing_of(config, name), lambda name=name: cost(config, name))
            asked = run_of(config, name, seed)
            once(out / f"{name}-{seed}.json", asked, lambda asked=asked: run(asked, target, questions, config))
    runs = {name: done for name in config.variants if (done := finished(config, name))}
    found = {
        "variants": {name: summed(config, name, runs) for name in runs},
        "config": asdict(config),
        "provenance": provenance(),
    }
    write_json(out / "results.json", found)
    write_text(out / "report.md", markdown(found))
    print(aligned(comparison(found["variants"])))
    print(f"written to {out}: report.md, results.json")


def once(path: Path, asked: Found, make: Callable[[], Found] | None = None) -> Found | None:
    """What the file holds of exactly what is `asked`; otherwise it is made and kept there, if `make` says how."""
    if path.is_file() and (kept := json.loads(path.read_text("utf-8")))["asked"] == asked:
        return kept
    if make is None:
        return None
    made = {"asked": asked, **make()}
    write_json(path, made)
    return made


def timing_of(config: Config, name: str) -> Found:
    """What a variant's time follows from."""
    return {"overrides": config.overrides(name), "rounds": config.rounds, "timed_steps": config.timed_steps}


def cost(config: Config, name: str) -> Found:
    """`ratio`: how many times as long as the base's a variant's step takes, the median of the rounds, and `interval`,
    the median's 95 % interval, None of fewer than 6 rounds; seconds of both."""
    if name == BASE:
        return {"ratio": 1.0, "interval": None}
    workers = {which: Worker(train_steps, config.overrides(which)) for which in (BASE, name)}
    rounds = []
    for number in range(config.rounds + 1):
        order = list(workers) if number % 2 else list(workers)[::-1]
        seconds = {which: workers[which].ask(config.timed_steps) for which in order}
        rounds.append({which: statistics.median(seconds[which]) for which in workers})
    for worker in workers.values():
        worker.close()
    del rounds[0]  # caches, compiled kernels, the optimiser's state
    ratios = [each[name] / each[BASE] for each in rounds]
    return {
        "ratio": statistics.median(ratios),
        "interval": figures.median_interval(ratios),
        "base_s": statistics.median(each[BASE] for each in rounds),
        "step_s": statistics.median(each[name] for each in rounds),
    }


def train_steps(overrides: list[str], line: Connection) -> None:
    """A process: makes a trainer, then as many steps as it is told, and answers with the seconds of each.

    The first of them are not counted: their hidden states were computed while the other process was timed.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = compose("train", [*overrides, f"out={folder}/out", "train.steps=1000000"])
            parallel = build(ParallelConfig, config.parallel, "parallel")
            trainer = assemble(config, parallel, distributed.start(resolve_device(config.device)))
    except UserError as error:
        line.recv()
        line.send(error)
        return
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


def run_of(config: Config, name: str, seed: int) -> Found | None:
    """What a run follows from: `training`, eagle-train's overrides, for as many steps as take the base's time, and the
    questions. None where the variant has not been timed.
    """
    timed = once(Path(config.out) / f"step-{name}.json", timing_of(config, name))
    if timed is None:
        return None
    low, high = timed["interval"] or (timed["ratio"], timed["ratio"])
    ratio = 1.0 if low <= 1 <= high else timed["ratio"]
    steps = max(1, round(config.steps / ratio))
    given = [f"seed={seed}", f"train.steps={steps}"]
    questions = {key: getattr(config, key) for key in ("questions", "limit", "max_tokens")}
    training = {"overrides": [*config.overrides(name), *given], "steps": steps}
    return {"name": f"{name}-{seed}", "training": training, **questions}


def run(asked: Found, target: Target, questions: list[Question], config: Config) -> Found:
    """Train a draft and let it answer. Raises UserError where either cannot be done; a training stays until its draft
    has answered, whatever it is asked."""
    folder = Path(config.out) / "training" / asked["name"]
    if once(folder / "asked.json", asked["training"]) is None:
        shutil.rmtree(folder, ignore_errors=True)
        once(folder / "asked.json", asked["training"], dict)  # one that is stopped goes on from its checkpoint
    given = [
        *asked["training"]["overrides"],
        f"out={folder}",
        "train.save_every=0",
        "train.eval_every=0",
        "train.resume=true",
    ]
    environment = {"GLIBC_TUNABLES": ALLOCATOR} | os.environ
    ended = subprocess.run([sys.executable, "-m", "eagle_train.train", *given], env=environment).returncode
    check(ended == 0, f"{asked['name']}: eagle-train ended with status {ended}; what it said is above")
    checkpoint, draft = trained(folder)
    same = checkpoint.state["target"]["fingerprint"] == target.identity.fingerprint
    check(same, f"{asked['name']}: trained for another target than {BASE}; variants share one")
    found = {"tokens": checkpoint.state["tokens"], "parameters": draft.num_parameters}
    found |= answered(Engine(target, draft, chain(DEPTH), max_batch_size=config.batch_size), questions, config)
    shutil.rmtree(folder)
    return found


def answered(engine: Engine, questions: list[Question], config: Config) -> Found:
    """TPC and acceptance over the questions; tokens and calls of each, by which two drafts are compared."""
    batches = [questions[start : start + config.batch_size] for start in range(0, len(questions), config.batch_size)]
    answers = [answer for batch in batches for together in ask(engine, batch, config.params) for answer in together]
    return {
        "tpc": figures.tpc(answers),
        "acceptance_per_depth": figures.acceptance(answers),
        "answers": [[answer.output.stats.tokens, answer.output.stats.calls] for answer in answers],
    }


def finished(config: Config, name: str) -> dict[int, Found]:
    """A variant's runs so far, by seed."""
    runs = {}
    for seed in config.seeds:
        asked = run_of(config, name, seed)
        if asked and (done := once(Path(config.out) / f"{name}-{seed}.json", asked)):
            runs[seed] = done
    return runs


def summed(config: Config, name: str, runs: dict[str, dict[int, Found]]) -> Found:
    """A variant's figures over its seeds, and its TPC's distance from the base's over the seeds that both have."""
    own, base = runs[name], runs.get(BASE, {})
    timed = once(Path(config.out) / f"step-{name}.json", timing_of(config, name))
    both = [seed for seed in own if seed in base]
    depths = zip(*(one["acceptance_per_depth"] for one in own.values()), strict=True)
    first = next(iter(own.values()))
    return {
        "overrides": config.variants[name],
        "parameters": first["parameters"],
        "step_time": {key: value for key, value in timed.items() if key != "asked"},
        "steps": first["asked"]["training"]["steps"],
        "tpc": statistics.fmean(one["tpc"] for one in own.values()),
        "tpc_by_seed": {seed: one["tpc"] for seed, one in own.items()},
        "acceptance_per_depth": [statistics.fmean(depth) for depth in depths],
        "gain": gain([own[seed] for seed in both], [base[seed] for seed in both]) if both and name != BASE else None,
    }


def gain(own: list[Found], base: list[Found]) -> dict[str, float]:
    """TPC above the base's, and 95 % of what it is when the questions are drawn anew; seeds are added up."""
    ours, theirs = (torch.tensor([one["answers"] for one in each]).sum(0).double() for each in (own, base))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(ours), (RESAMPLES, len(ours)), generator=generator)

    def tpc(pairs: torch.Tensor) -> torch.Tensor:
        tokens, calls = pairs.sum(-2).unbind(-1)
        return tokens / calls

    spread = (tpc(ours[drawn]) - tpc(theirs[drawn])).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    low, high = spread.tolist()
    return {"tpc": (tpc(ours) - tpc(theirs)).item(), "low": low, "high": high}


def comparison(variants: Found) -> str:
    """A row for each variant."""
    rows = []
    for name, one in variants.items():
        above = one["gain"]
        rows.append(
            [
                " ".join([plain(name), *map(code, one["overrides"])]),
                f"{one['parameters'] / 1e6:.1f}",
                step_time(one["step_time"]),
                str(one["steps"]),
                str(len(one["tpc_by_seed"])),
                f"{one['tpc']:.3f}",
                f"{above['tpc']:+.3f} ({above['low']:+.3f} to {above['high']:+.3f})" if above else "",
                " ".join(f"{share:.2f}" for share in one["acceptance_per_depth"]),
            ]
        )
    header = [
        "variant",
        "M parameters",
        "step time (95 %)",
        "steps",
        "seeds",
        "TPC",
        "gain (95 %)",
        "acceptance by depth",
    ]
    return table(header, rows)


def markdown(found: Found) -> str:
    """report.md."""
    config = found["config"]
    asked = "all questions" if config["limit"] is None else f"{config['limit']} questions"
    base = code(" ".join(config["base"]))
    setting = (
        f"Base {base}, {config['steps']} steps; a variant has as many steps as take that long, and just as many where "
        "the interval of its step time holds 1. Step time: as a multiple of the base's. TPC (tokens committed in "
        f"decoding, by calls of the target) of a chain of {DEPTH} at temperature 0 over {asked} of "
        f"{code(config['questions'])}, {config['max_tokens']} tokens an answer at most. Gain: TPC above the base's; "
        "its interval is that of other questions, not of other seeds."
    )
    parts = ["# Ablations at equal time", setting, comparison(found["variants"]), "## Made on", made_on(found)]
    return "\n\n".join(parts) + "\n"


def step_time(found: Found) -> str:
    spread = "" if found["interval"] is None else " ({:.2f} to {:.2f})".format(*found["interval"])
    return f"{found['ratio']:.2f}{spread}"


if __name__ == "__main__":
    main()
