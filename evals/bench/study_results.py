"""What an experiment has measured so far, by file, and what follows from it: figures, gains, how long the rest takes.

Knows nothing of how it is measured or shown. DESIGN section 3.8.
"""

import itertools
from pathlib import Path
from typing import Any

from eagle_train.results import time_in_words
from evals.bench import contexts, statistics
from evals.bench.study import StudyConfig, Trained
from evals.bench.study_answers import FIGURES, SPEED, answers_asked, speed_asked
from evals.bench.study_runs import draft_of, kept, timing_asked, training_asked

Found = dict[str, Any]


def runs_of(config: StudyConfig) -> list[Trained]:
    """The drafts of all variants, each once: the shortest first, seed by seed."""
    orders = itertools.product(sorted(config.study.steps), config.seeds, config.study.equal, config.chosen)
    return [*dict.fromkeys(trained(config, name, steps, equal, seed) for steps, seed, equal, name in orders)]


def trained(config: StudyConfig, name: str, steps: int, equal: str, seed: int) -> Trained:
    """A variant's draft where the reference makes so many steps."""
    if config.draft.path is not None:
        return Trained(name, steps, None)
    return Trained(name, config.own_steps(steps, equal, timing_of(config, name)), seed)


def timed_runs(config: StudyConfig) -> dict[str, Trained]:
    """The drafts whose speed-up is measured."""
    steps, equal, seed = max(config.study.steps), config.study.equal[0], config.seeds[0]
    return {name: trained(config, name, steps, equal, seed) for name in config.chosen}


def timing_file(config: StudyConfig, name: str) -> Path:
    return Path(config.out) / f"step-{config.trained_as(name)}.json"


def run_file(config: StudyConfig, run: Trained) -> Path:
    return Path(config.out) / f"{config.draft_run(run)}.json"


def answers_file(config: StudyConfig, run: Trained, tree: str) -> Path:
    return Path(config.out) / f"{run}-{tree}.json"


def speed_file(config: StudyConfig) -> Path:
    return Path(config.out) / "speed.json"


def timing_of(config: StudyConfig, name: str) -> Found:
    """A variant's `cost`, which is there by now."""
    timing = _there(timing_file(config, name), timing_asked(config, config.trained_as(name)))
    return {key: value for key, value in timing.items() if key != "asked"}


def _there(path: Path, asked: Found) -> Found:
    """A result that was made before."""
    found = kept(path, asked)
    assert found is not None
    return found


def trainings_left(config: StudyConfig, runs: list[Trained]) -> list[Trained]:
    """What is still to be trained, each draft once."""
    if config.draft.path is not None:
        return []
    return [*dict.fromkeys(config.draft_run(run) for run in runs if not is_trained(config, run))]


def is_trained(config: StudyConfig, run: Trained) -> bool:
    """Whether a run's draft was trained, and, where something is still to be decoded with it, was not removed since."""
    if kept(run_file(config, run), training_asked(config, run)) is None:
        return False
    is_done = all(is_answered(config, run, tree) for tree in config.study.trees) and not _is_to_be_timed(config, run)
    return is_done or draft_of(config, run).is_dir()


def is_answered(config: StudyConfig, run: Trained, tree: str) -> bool:
    return kept(answers_file(config, run, tree), answers_asked(config, run, tree), FIGURES) is not None


def _is_to_be_timed(config: StudyConfig, run: Trained) -> bool:
    timed = trained(config, run.variant, max(config.study.steps), config.study.equal[0], config.seeds[0])
    return config.timed_questions > 0 and run == timed and not are_timed(config)


def are_timed(config: StudyConfig) -> bool:
    """Whether the speed-ups were measured."""
    asked = {name: timing_asked(config, name) for name in config.trainings}
    steps_are_known = all(kept(timing_file(config, name), each) is not None for name, each in asked.items())
    return steps_are_known and kept(speed_file(config), speed_asked(config, timed_runs(config)), SPEED) is not None


def forecast(config: StudyConfig, left: list[Trained]) -> str:
    """How long the rest of the trainings takes, by what was measured."""
    fresh = trainings_left(config, left)
    training = sum(run.steps * timing_of(config, run.variant)["step_s"] for run in fresh)
    return f"{len(fresh)} trainings left, {time_in_words(training)}"


def parts_of(config: StudyConfig) -> list[Found]:
    """The figures of every variant, for each number of steps and each way to be equal."""
    return [
        {"steps": steps, "equal": equal, "variants": variants_of(config, steps, equal)}
        for steps in sorted(config.study.steps)
        for equal in config.study.equal
    ]


def variants_of(config: StudyConfig, steps: int, equal: str) -> Found:
    """Each variant's figures, of all its seeds together, and its gain over the reference."""
    runs = {name: [trained(config, name, steps, equal, seed) for seed in config.seeds] for name in config.chosen}
    answers = {name: answers_of(config, own) for name, own in runs.items()}
    reference, found, first = config.study.reference, {}, next(iter(config.study.trees))
    theirs = {tree: [each["answers"] for each in by_seed] for tree, by_seed in answers[reference].items()}
    for name, own in runs.items():
        same = config.draft_run(own[0]) == config.draft_run(runs[reference][0])  # and so for all seeds
        made = _there(run_file(config, own[0]), training_asked(config, own[0]))
        rounds = {tree: [each["contexts"] for each in by_seed] for tree, by_seed in answers[name].items()}
        counts = {tree: [each["answers"] for each in by_seed] for tree, by_seed in answers[name].items()}
        found[name] = {
            "steps": own[0].steps,
            "seeds": config.seeds,
            "tokens": made["tokens"],
            "parameters": made["parameters"],
            "tpc": {tree: statistics.tpc_interval(each) for tree, each in counts.items()},
            "tpc_by_seed": {tree: [each["tpc"] for each in by_seed] for tree, by_seed in answers[name].items()},
            "acceptance_per_depth": {tree: contexts.acceptance(each) for tree, each in rounds.items()},
            "by_context": {tree: contexts.rows_of(each) for tree, each in rounds.items()},
            "looping_answers": max(each["looping_answers"] for one in answers[name].values() for each in one),
            "gain": {tree: statistics.tpc_gain(each, theirs[tree], same) for tree, each in counts.items()},
            "gain_over_first_tree": {
                tree: statistics.tpc_gain(each, counts[first], same_drafts=True) for tree, each in counts.items()
            },
        }
    return found


def answers_of(config: StudyConfig, runs: list[Trained]) -> dict[str, list[Found]]:
    """What runs answered, by tree and seed."""
    return {
        tree: [_there(answers_file(config, run, tree), answers_asked(config, run, tree)) for run in runs]
        for tree in config.study.trees
    }
