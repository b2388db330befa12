"""What an experiment cannot do, before it starts, and how long it will take: by results that are there, a few steps
and a few answers.

Knows nothing of what the variants are. DESIGN section 3.8.
"""

import itertools
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from eagle_train.artifacts.format import read_artifact
from eagle_train.drafts import planned_config
from eagle_train.errors import check
from eagle_train.inference import Dispatcher, Engine, Requests
from eagle_train.models.draft_quantisation import Quant, misfit
from eagle_train.models.target import Target
from eagle_train.results import time_in_words
from eagle_train.training.lookahead import DRAWN_AHEAD
from evals.bench.answering import answer_questions, batches_of
from evals.bench.questions import Question
from evals.bench.requests import room_for
from evals.bench.study import StudyConfig, Trained
from evals.bench.study_results import are_timed, is_answered, is_trained, timing_file, trained
from evals.bench.study_runs import kept, timing_asked, train_steps
from evals.bench.worker import Worker

TRIED_STEPS = 2  # of the reference, for the time of a step
STARTING_S = 15.0  # of a process, until its first step

Found = dict[str, Any]


def check_drafts(config: StudyConfig, composed: Mapping[str, DictConfig], hf_config: Any) -> None:
    """Raise UserError for a tree that is deeper than a variant's draft can propose, and for a draft that has not the
    shapes which it is to be quantised in. `hf_config`: the target's Hugging Face config."""
    given = None if config.draft.path is None else read_artifact(config.draft.path)
    for name, values in composed.items():
        settings: Any = OmegaConf.to_container(values.draft)
        shape = planned_config(hf_config, settings) if given is None else given.draft
        for tree, spec in config.study.trees.items():
            deepest = Dispatcher(spec).deepest
            said = f"study.trees.{tree}={spec}: has {deepest} levels, and the drafts of {name} propose {shape.levels}"
            check(shape.levels is None or deepest <= shape.levels, f"{said}; give fewer, or another draft")
        quant = config.decoding(name).quant
        if quant.scheme != "none":
            own = Quant() if given is None else given.quant
            said = f"study.decoding.{name}.quant={quant}: "
            check(own.scheme == "none", f"{said}draft={config.draft.path} is quantised already, {own}")
            with torch.device("meta"):
                reason = misfit(shape.module(), quant)
            check(reason is None, f"{said}{reason}; leave it out with only, or give another draft")


def planned(config: StudyConfig, target: Target, questions: list[Question], longest: int) -> str:
    """What is left of a study and how long it takes at most, a line each; found out in seconds.

    Answers are taken to last as long as plain decoding's, and a variant's step that was not timed as the reference's.
    """
    untimed = [name for name in config.trainings if _timing(config, name) is None]
    step_s = step_seconds(config) if untimed else 0.0
    drafts, answers = _drafts(config, step_s), _unanswered(config)
    steps = (config.rounds + 1) * (config.timed_steps + DRAWN_AHEAD)
    each = 2 * (steps * step_s + STARTING_S)  # the reference's process and the variant's
    speedups = 0 if config.timed_questions == 0 or are_timed(config) else _decodings(config)
    batches, timed = len(batches_of(questions, config.batch_size)), min(config.timed_questions, len(questions))
    left = {
        f"time of a step of {len(untimed)} variants": len(untimed) * each,
        f"{len(drafts)} drafts": sum(drafts.values()) + len(drafts) * STARTING_S,
        f"{answers} times {len(questions)} answers": answers
        and answers * batches * _answering_s(config, target, questions[: config.batch_size], longest),
        f"{speedups} times {timed} answers, one by one": speedups
        and speedups * timed * _answering_s(config, target, questions[:1], longest),
    }
    lines = {what: seconds for what, seconds in left.items() if seconds} | {"all": sum(left.values())}
    return "\n".join(f"{what}: {time_in_words(seconds)}" for what, seconds in lines.items())


def _timing(config: StudyConfig, name: str) -> Found | None:
    return kept(timing_file(config, name), timing_asked(config, config.trained_as(name)))


def step_seconds(config: StudyConfig) -> float:
    """Seconds of a step of the reference."""
    known = _timing(config, config.study.reference)
    if known is not None:
        return float(known["step_s"])
    worker = Worker(train_steps, config.overrides(config.study.reference))
    seconds = worker.ask(TRIED_STEPS)
    worker.close()
    return median(seconds)


def _orders(config: StudyConfig) -> list[tuple[int, int, str, str]]:
    return [*itertools.product(config.study.steps, config.seeds, config.study.equal, config.chosen)]


def _run(config: StudyConfig, order: tuple[int, int, str, str]) -> Trained | None:
    """None where it is not known yet how many steps the variant makes."""
    steps, seed, equal, name = order
    known = config.draft.path is not None or _timing(config, name) is not None
    return trained(config, name, steps, equal, seed) if known else None


def _drafts(config: StudyConfig, step_s: float) -> dict[Any, float]:
    """The seconds of each draft that is still to be trained."""
    found: dict[Any, float] = {}
    for order in _orders(config) if config.trainings else []:
        run, (steps, seed, equal, name) = _run(config, order), order
        if run is None:
            alone = config.trained_as(name) == config.trained_as(config.study.reference)
            found[config.trained_as(name), steps, seed, None if alone else equal] = steps * step_s
        elif not is_trained(config, run):
            timing = _timing(config, name)
            assert timing is not None
            found[config.draft_run(run)] = run.steps * timing["step_s"]
    return found


def _unanswered(config: StudyConfig) -> int:
    """How many times all questions are still to be answered."""
    runs = dict.fromkeys(_run(config, order) or order for order in _orders(config))
    done = [isinstance(run, Trained) and is_answered(config, run, tree) for run in runs for tree in config.study.trees]
    return done.count(False)


def _decodings(config: StudyConfig) -> int:
    """What answers one by one: each variant with each tree, and plain decoding for each way to sample."""
    plain = len({str(config.sampling(name)) for name in config.chosen})
    return len(config.chosen) * len(config.study.trees) + plain


def _answering_s(config: StudyConfig, target: Target, questions: Sequence[Question], longest: int) -> float:
    """Seconds of plain decoding's answers to questions that are decoded together."""
    rows = len(questions)
    engine = Engine(target, max_batch_size=rows, kv_tokens=room_for(rows, longest, "chain1"))
    started = time.perf_counter()
    answer_questions(engine, Requests(target), questions, config.sampling(config.study.reference))
    return time.perf_counter() - started
