"""What a drafter is worth on a file of questions: tokens per call, latency, and the speed-up over plain decoding.

Plain and speculative decoding share the target and the engine's code, and answer the same questions batch by batch in
turn. Paper sections 2.2 and 2.4 (table 1); DESIGN sections 3.8 and 3.10.

    python -m evals.mt_bench draft=DIR questions=FILE.jsonl tree=chain3 temperature=0 top_p=0.9 out=DIR
    python -m evals.mt_bench draft=DIR suite=humaneval suite.path=HumanEval.jsonl out=DIR
    python -m evals.mt_bench drafter=ngram questions=FILE.jsonl out=DIR
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig

from eagle_train.errors import UserError
from eagle_train.inference.drafters import drafter_name
from eagle_train.models.draft_quantisation import Quant, quant_of
from eagle_train.settings import build
from evals.bench import statistics
from evals.bench.answering import Run, run_in_turn, seeded
from evals.bench.asked import AskedConfig, prepared
from evals.bench.config import check_least
from evals.bench.contexts import by_context
from evals.bench.draft_report import answer_rows, markdown, summary
from evals.bench.evaluation import evaluation
from evals.bench.report import plot_acceptance
from evals.bench.requests import check_fit, prompt_hash
from evals.bench.session import Session
from evals.bench.stage_clock import StageClock, runs_ahead
from evals.bench.train_serve import train_serve_check
from evals.bench.trees import check_tree, have_one_depth, may_decline, not_drafted, tree_names

ANSWERS, REFUSED = "answers.jsonl", "answers_refused.jsonl"  # REFUSED: of a run without a result


@dataclass(kw_only=True)
class Config(AskedConfig):
    """conf/commands/mt_bench.yaml, which says what each key is. Raises UserError for values that cannot be."""

    tree: Any
    quant: Quant
    batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_draft(self.quant)
        check_least(self, 1, "batch_size")
        check_tree(self.tree, self.batch_size)


@evaluation("mt_bench")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    session, too_long = prepared(config)
    plain, speculative = variants(session, check_fit(session.requests, session.questions, config.max_tokens))
    run_in_turn([plain, speculative], session.questions, config.params, config.batch_size)
    about = {"draft_training": session.artifact.training if config.draft.path else None, **session.about()}
    figures = session.world.agreed(measured(plain, speculative, config))  # ranks' clocks differ
    found = {**figures, "too_long": too_long, **config.about_questions(), **about}
    drafted = bool(found["acceptance_per_depth"])
    answers = answer_rows(plain.answers, speculative.answers, partial(prompt_hash, session.requests))
    session.write(REFUSED, answers)  # which say why, where the times cannot be right
    if config.batch_size == 1 and drafted:
        statistics.check_timing(found)
    session.remove(REFUSED)
    session.remove(ANSWERS)  # whenever this run ends, none stand beside another run's results
    if session.world.is_main and drafted:
        plot_acceptance(found, session.out / "acceptance.png")
    session.report(found, markdown(found))
    session.write(ANSWERS, answers)
    files = ["report.md", "results.json", *(["acceptance.png"] if drafted else []), ANSWERS]
    session.say(summary(found), f"written to {session.out}: {', '.join(files)}")


def variants(session: Session[Config], longest: int) -> tuple[Run, Run]:
    """Plain decoding, and decoding with the drafter. `longest`: as for `Session.engine`."""
    config, drafter = session.config, session.chosen_drafter(session.config.quant)
    plain = session.engine(max_batch_size=config.batch_size, longest=longest)
    drafting = session.engine(drafter, config.tree, max_batch_size=config.batch_size, longest=longest)
    return Run(plain, session.requests), Run(drafting, session.requests, drafter)


def measured(plain: Run, speculative: Run, config: Config) -> dict[str, Any]:
    """The figures, in seconds unless a name says otherwise. Raises UserError where nothing was decoded, and where
    nothing was drafted though the tree drafts at every round."""
    answers, engine = speculative.answers, speculative.engine
    compared = statistics.compare(plain.batches, speculative.batches, config.max_tokens)
    compared["speedup_interval"] = statistics.speedup_interval(plain.batches, speculative.batches)
    acceptance = statistics.acceptance(answers)
    if not acceptance and not may_decline(engine):
        silent = f"drafter={drafter_name(config.spec)}: it drafted nothing for these questions; ask others"
        raise UserError(not_drafted(engine, config.batch_size) if config.is_eagle else silent)
    if config.temperature > 0 and config.options.drafting != "greedy":
        compared["differing_answers"] = None  # two samples may well differ
    same_depth = have_one_depth(engine.dispatcher, config.batch_size)
    own, other = ({**statistics.latency(run.batches), **stages(run, config)} for run in (speculative, plain))
    return {
        "tpc": statistics.tpc(answers),
        **compared,
        "acceptance_per_depth": acceptance,
        "acceptance_after_depth_before": statistics.conditional(acceptance) if same_depth else None,
        **own,
        **{f"plain_{name}": value for name, value in other.items()},
        "repeated_8grams": statistics.repeated_ngrams(statistics.token_ids(answers)),
        "looping_answers": statistics.looping(statistics.token_ids(answers)),
        **statistics.counts(answers, config.max_tokens),
        "per_category_and_turn": statistics.groups(speculative.batches, plain.batches),
        "by_context": by_context(answers, engine.target.max_positions),
        "train_serve_check": train_serve_check(speculative, config.batch_size) if config.is_eagle else None,
        "alignment": config.draft.alignment if config.is_eagle else None,
        "quant": str(quant_of(speculative.draft)) if config.is_eagle else None,
        "drafter": drafter_name(config.spec),
        "tree": tree_names(engine.dispatcher, config.batch_size),
        "temperature": config.temperature,
        "batch_size": config.batch_size,
    }


def stages(run: Run, config: Config) -> dict[str, Any]:
    """Milliseconds of each stage, see `statistics.stages`: on a CPU those of the run itself.

    On a GPU a stage ends on the host before its work does, and waiting for it slows rounds. There one batch is answered
    again with waits: of those with drafts the one with the most rounds.
    """
    engine, batches = run.engine, run.batches
    if not runs_ahead(engine.target.device):
        return statistics.stages(engine.stage_times.seconds, engine.stage_times.runs, len(batches))
    batch = max(batches, key=lambda batch: (len(statistics.acceptance(batch)) > 0, statistics.num_rounds([batch])))
    params = [seeded(config.params, answer.question, answer.turn) for answer in batch]
    clock = StageClock(engine)
    with clock.running(forwards=False):
        engine.generate([answer.prompt for answer in batch], params)
    return statistics.stages(clock.seconds, clock.runs, 1)


if __name__ == "__main__":
    main()
