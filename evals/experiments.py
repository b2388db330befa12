"""Drafts that were trained or decode otherwise, beside one another: TPC and speed-up at equal time, or equal tokens.

A study (conf/study) names variants of a training, of decoding, or of both. A variant's step is timed against the
reference's, each in its own process, in turn; by their ratio it gets fewer or more steps at equal time. Drafts are
trained by eagle-train, with several seeds, once for all variants that are trained alike, and answer held-out questions
with each of the study's trees. Results are files, so that a study can be run in parts, and goes on where it was
stopped. Paper sections 2.3 and 3; DESIGN section 3.8.

    python -m evals.experiments study=kinds plan=true
    python -m evals.experiments study=alignment draft=DIR
    python -m evals.experiments only=[unroll2] 'study.steps=[280]' seeds=[0] limit=120
    python -m evals.experiments "study.variants.wider=['draft.intermediate_size=1536']" only=[wider]
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from eagle_train.artifacts.format import check_sizes, read_artifact
from eagle_train.artifacts.markdown import aligned
from eagle_train.cli import as_overrides, compose
from eagle_train.corpus.source import tell_bundled
from eagle_train.errors import check
from eagle_train.hardware import resolve_device
from eagle_train.inference import Requests
from eagle_train.inference.requests.readable import chats
from eagle_train.models.loading import TargetConfig, load_config, load_target
from eagle_train.models.target import Target
from eagle_train.results import prepared
from eagle_train.settings import build
from evals.bench import study_answers, study_runs
from evals.bench.evaluation import evaluation_alone, origin
from evals.bench.questions import Question, read_questions
from evals.bench.report import warnings, write_report
from evals.bench.requests import check_fit
from evals.bench.study import StudyConfig, check_name
from evals.bench.study_plan import check_drafts, planned
from evals.bench.study_plot import plot
from evals.bench.study_report import markdown, part_tables, speed_table
from evals.bench.study_results import (
    answers_file,
    forecast,
    is_trained,
    parts_of,
    run_file,
    runs_of,
    speed_file,
    timed_runs,
    timing_file,
    timing_of,
)
from evals.bench.study_runs import once

Found = dict[str, Any]


@evaluation_alone("experiments")
def main(values: DictConfig) -> None:
    config = build(StudyConfig, values, "")
    check_name(config.study.name, HydraConfig.get().runtime.choices["study"])
    # Raises for mistakes.
    composed = {name: compose("train", as_overrides("train", config.overrides(name))) for name in config.chosen}
    questions = read_questions(config.questions, config.limit)
    out = Path(config.out) if config.plan else prepared(config.out)
    own = build(TargetConfig, composed[config.study.reference].target, "target")
    if config.draft.path is not None:
        check_sizes(read_artifact(config.draft.path).target, own, f"draft={config.draft.path}")
    check_drafts(config, composed, load_config(own))
    target = load_target(own, resolve_device(config.device), reads=chats)
    config.follow_from(target.identity.fingerprint, questions)
    longest = check_fit(Requests(target), questions, config.max_tokens)
    tell_bundled(config.questions, own.path)
    print(planned(config, target, questions, longest), flush=True)
    if config.plan:
        return
    make_drafts_and_answers(config, target, questions, longest)
    parts = parts_of(config)
    found: Found = {
        "parts": parts,
        "looping_answers": max(one["looping_answers"] for part in parts for one in part["variants"].values()),
        "timings": {name: timing_of(config, name) for name in config.chosen} if config.trainings else {},
        **speedups_of(config, target, questions, longest),
        "target": target.name,
        "target_source": target.identity.fingerprint,
        "config": asdict(config),
        **origin(),
    }
    write_report(out, found, markdown(found))
    plot(found, out / "tpc.png")
    tables = [text for part in found["parts"] for text in part_tables(found, part)]
    tables += [speed_table(found["speedups"])] if found["speedups"] else []
    print(*map(aligned, tables), sep="\n\n")
    print(*warnings(found), f"written to {out}: report.md, results.json, tpc.png", sep="\n")
    check(not found["left_out"], "; ".join(found["left_out"]))


def make_drafts_and_answers(config: StudyConfig, target: Target, questions: list[Question], longest: int) -> None:
    """What is not there yet: the times of steps, drafts, and their answers with each tree."""
    for name in config.trainings:
        print(f"{name}: time of a step", flush=True)
        once(timing_file(config, name), study_runs.timing_asked(config, name), partial(study_runs.cost, config, name))
    for done, run in enumerate(wanted := runs_of(config)):
        print(f"{run} ({forecast(config, wanted[done:])})", flush=True)
        if not is_trained(config, run):
            run_file(config, run).unlink(missing_ok=True)  # its draft was removed
        train = partial(study_runs.train, config, config.draft_run(run), target)
        once(run_file(config, run), study_runs.training_asked(config, run), train)
        for tree in config.study.trees:
            answer = partial(study_answers.answered, config, run, tree, target, questions, longest)
            asked = study_answers.answers_asked(config, run, tree)
            once(answers_file(config, run, tree), asked, answer, study_answers.FIGURES)


def speedups_of(config: StudyConfig, target: Target, questions: list[Question], longest: int) -> Found:
    """The speed-ups, by variant and tree, which are measured where they are not there yet, and what is `left_out`."""
    if config.timed_questions == 0:
        return {"speedups": None, "left_out": []}
    time_all = partial(study_answers.speed, config, runs := timed_runs(config), target, questions, longest)
    found = once(speed_file(config), study_answers.speed_asked(config, runs), time_all, study_answers.SPEED)
    if found["left_out"]:
        speed_file(config).unlink()  # measured again the next time
    return {key: found[key] for key in ("speedups", "left_out")}


if __name__ == "__main__":
    main()
