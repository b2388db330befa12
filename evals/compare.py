"""Drafters beside one another, on several tasks and batch sizes: what each brings, and what it costs.

All share the target and the engine's code, and answer the same prompts batch by batch in turn, with plain decoding and
transformers.generate. Answers are the target's own whatever drafts, and the report says how many are equal.
DESIGN sections 3.8 and 3.10.

    python -m evals.compare 'drafters={eagle: {draft: DIR}, ngram: {max_draft_len: 5}}' tasks=[FILE.jsonl] out=DIR
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig

from eagle_train.corpus.source import tell_bundled
from eagle_train.errors import check
from eagle_train.inference.options import DraftOptions
from eagle_train.settings import build
from evals.bench.comparison import ComparisonConfig, asked_of, compare
from evals.bench.comparison_report import markdown, summary
from evals.bench.contestants import contestants
from evals.bench.evaluation import evaluation
from evals.bench.pareto import plot_pareto
from evals.bench.report import first_of
from evals.bench.session import Session
from evals.bench.tasks import GROUPED, read_tasks


@dataclass(kw_only=True)
class Config(ComparisonConfig):
    """conf/commands/compare.yaml, which says what each key is. Raises UserError for values that cannot be."""

    drafters: Any
    tree: Any
    tasks: Any
    # Each drafter has its own, and so has each task.
    draft: DraftOptions = field(default_factory=DraftOptions)
    questions: str | None = None  # type: ignore[assignment]


@evaluation("compare")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    tasks, drafters = read_tasks(config.tasks), contestants(config.drafters, config.tree)
    for each in drafters:
        each.check_early(config.target)
    session = Session(config)
    for task in tasks if session.world.is_main else []:
        tell_bundled(task.path, config.target.path, key="tasks")
    session.questions = [question for task in tasks for question in task.questions]
    tasks = [asked_of(task, session.requests, config) for task in tasks]
    about: dict[str, Any] = {
        "drafters": [each.about() for each in drafters],
        "tasks": [task.about() for task in tasks],
        "grouped": GROUPED if any(task.format == "Spec-Bench" for task in tasks) else None,
    }
    cells = len(tasks) * len(config.batch_sizes)
    for measured, (rows, wrong) in enumerate(compare(session, drafters, tasks), 1):  # each is written at once
        found = {"rows": rows, "left_out": wrong, "cells": {"measured": measured, "of": cells}, **about}
        found |= session.about()
        session.report(found, markdown(found))
        if session.world.is_main:
            plot_pareto(found, session.out / "pareto.png")
    session.say(summary(found), f"written to {session.out}: report.md, results.json, pareto.png")
    check(not wrong, first_of(wrong))


if __name__ == "__main__":
    main()
