"""How an experiment's drafts decode: answers of a variant with a tree for TPC, and in turn for the speed-up.

Each result is made once, see `study_runs`. Knows nothing of training. DESIGN section 3.8.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from typing import Any

from eagle_train.artifacts.format import load_draft
from eagle_train.errors import UserError
from eagle_train.inference import Engine, EngineConfig, Requests
from eagle_train.inference.drafters.trained import drafter_of
from eagle_train.models.draft_quantisation import quantise_draft
from eagle_train.models.target import Target
from evals.bench import statistics
from evals.bench.answering import Run, answer_questions, batches_of, run_in_turn
from evals.bench.contexts import counted, rounds_of
from evals.bench.questions import Question
from evals.bench.requests import room_for
from evals.bench.study import StudyConfig, Trained
from evals.bench.study_runs import draft_of, training_asked

Found = dict[str, Any]
FIGURES = ("tpc", "contexts", "looping_answers", "answers", "seconds")  # of `answered`
SPEED = ("speedups", "left_out")  # of `speed`


def answers_asked(config: StudyConfig, run: Trained, tree: str) -> Found:
    """What the answers of a variant with a tree follow from."""
    questions = {key: getattr(config, key) for key in ("questions", "limit", "max_tokens", "asked")}
    decoding = asdict(config.decoding(run.variant))
    return {
        "training": training_asked(config, run),
        "decoding": decoding,
        "tree": config.study.trees[tree],
        **questions,
    }


def answered(
    config: StudyConfig, run: Trained, tree: str, target: Target, questions: list[Question], longest: int
) -> Found:
    """TPC over the questions; rounds by context, from which acceptance follows; tokens and calls of each question, by
    which drafts are compared; and the seconds that it took. `longest`: the most tokens of a prompt and its answer."""
    rows, started = config.batch_size, time.perf_counter()
    engine, params = engine_of(config, run, tree, target, rows, longest), config.sampling(run.variant)
    requests, answers = Requests(target), []
    for batch in batches_of(questions, rows):
        answers += list(chain.from_iterable(answer_questions(engine, requests, batch, params)))
    return {
        "tpc": statistics.decoded_tpc(answers, config.max_tokens),
        "contexts": counted(rounds_of(answers), target.max_positions),
        "looping_answers": statistics.looping(statistics.token_ids(answers)),
        "answers": statistics.by_question(answers),
        "seconds": time.perf_counter() - started,
    }


def engine_of(config: StudyConfig, run: Trained, tree: str, target: Target, rows: int, longest: int) -> Engine:
    """An engine that decodes as a variant does."""
    decoding, spec = config.decoding(run.variant), config.study.trees[tree]
    draft = quantise_draft(load_draft(draft_of(config, run), target.identity), decoding.quant)
    drafter = drafter_of(draft, target, decoding.alignment)
    room = room_for(rows, longest, spec, drafter)
    options = EngineConfig(max_batch_size=rows, kv_tokens=room, drafting=decoding.drafting)
    return Engine(target, drafter, spec, options)


def speed_asked(config: StudyConfig, runs: Mapping[str, Trained]) -> Found:
    """What the speed-ups follow from."""
    answers = {name: [answers_asked(config, run, tree) for tree in config.study.trees] for name, run in runs.items()}
    return {"answers": answers, "timed_questions": config.timed_questions}


def speed(
    config: StudyConfig, runs: Mapping[str, Trained], target: Target, questions: list[Question], longest: int
) -> Found:
    """The speed-up over plain decoding of each variant's draft with each tree, single prompts; in turn are all that
    sample alike, with plain decoding that does. A speed-up that exceeds its TPC is None, and told in `left_out`.
    """
    count = min(config.timed_questions, len(questions))
    asked = [questions[place * len(questions) // count] for place in range(count)]
    found: Found = {name: {} for name in runs}
    wrong: list[str] = []
    alike: dict[str, list[str]] = {}
    for name in runs:
        alike.setdefault(str(config.sampling(name)), []).append(name)
    for names in alike.values():
        _speed_in_turn(config, {name: runs[name] for name in names}, target, asked, longest, found, wrong)
    return {"speedups": found, "left_out": wrong}


def _speed_in_turn(
    config: StudyConfig,
    runs: Mapping[str, Trained],
    target: Target,
    asked: list[Question],
    longest: int,
    found: Found,
    wrong: list[str],
) -> None:
    """Adds to `found` and `wrong`."""
    requests = Requests(target)
    plain = Run(Engine(target, max_batch_size=1, kv_tokens=room_for(1, longest, "chain1")), requests)
    pairs = [(name, tree) for name in runs for tree in config.study.trees]
    others = [Run(engine_of(config, runs[name], tree, target, 1, longest), requests) for name, tree in pairs]
    run_in_turn([plain, *others], asked, config.sampling(pairs[0][0]), 1)
    for (name, tree), other in zip(pairs, others, strict=True):
        measured = statistics.compare(plain.batches, other.batches, config.max_tokens)
        measured |= {"tpc": statistics.decoded_tpc(other.answers, config.max_tokens)}
        measured["interval"] = statistics.speedup_interval(plain.batches, other.batches)
        found[name][tree] = measured
        try:
            statistics.check_timing({**measured, "speedup_interval": measured["interval"]})
        except UserError as error:  # the others stand, and took long to measure
            found[name][tree] = None
            wrong.append(f"{name}, {tree}: {error}")
