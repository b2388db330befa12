"""What quantising a draft costs and gains: tokens per call, acceptance, drafting latency and bytes. Paper table 2.

The draft as it is, in FP8 and in INT4, and exports of it that were rounded otherwise, share one target and answer the
same questions batch by batch in turn. Knows nothing of how weights are rounded.

    python -m evals.quantisation draft=DIR questions=FILE.jsonl scope=ffn also=[DIR] out=DIR
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import truediv
from statistics import median
from typing import Any

from omegaconf import DictConfig

from eagle_train.artifacts.format import load_draft
from eagle_train.artifacts.markdown import aligned, code, plain
from eagle_train.errors import check
from eagle_train.models.draft_quantisation import SCOPES, Quant
from eagle_train.settings import build
from evals.bench import statistics
from evals.bench.answering import run_in_turn
from evals.bench.config import SampledConfig, check_least
from evals.bench.contexts import by_context
from evals.bench.evaluation import evaluation
from evals.bench.quantised_drafts import LABELS, TimedRun, comparison, export_names, feed_forward_bytes, unfit
from evals.bench.report import contexts_beside, document, loops, made_on, sampling, several, subject
from evals.bench.requests import check_fit
from evals.bench.session import Session
from evals.bench.trees import check_tree, not_drafted, tree_names

SCOPE = {"ffn": "its feed-forward", "all_linear": "all its matrices"}
NOTE = (
    "TPC: tokens committed in decoding, by calls of the target; its change is against the draft as it is. Drafting "
    "takes the median over the batches of questions, which all drafts answered in turn; relative is the median of "
    "each batch's time divided by that of the draft as it is. In brackets: 95 % intervals, of the change by bootstrap "
    "over the questions, the same for both, of relative by order statistics over the batches, from 6 on. MB are 10^6 "
    "bytes, as held in memory in this run."
)


@dataclass(kw_only=True)
class Config(SampledConfig):
    """conf/commands/quantisation.yaml, which says what each key is. Raises UserError for values that cannot be."""

    tree: Any
    scope: str
    also: list[str]
    limit: int | None
    batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "batch_size")
        check_tree(self.tree, self.batch_size)
        check(self.scope in SCOPES, f"scope={self.scope}: must be {' or '.join(SCOPES)}")


@evaluation("quantisation")
def main(values: DictConfig) -> None:
    session = Session(build(Config, values, ""))
    config, quant = session.config, session.artifact.quant
    check(quant.scheme == "none", f"draft={config.draft.path}: quantised already, {quant}; export it with quant=none")
    reasons = unfit(session.draft, config.scope)
    runs = variants(session, check_fit(session.requests, session.questions, config.max_tokens), reasons)
    run_in_turn(list(runs.values()), session.questions, config.params, config.batch_size)
    found = {
        "schemes": {scheme: measured(run, runs["none"], config) for scheme, run in runs.items()},
        "left_out": reasons,
        "scope": config.scope,
        "tree": tree_names(runs["none"].engine.dispatcher, config.batch_size),
        "temperature": config.temperature,
        "batch_size": config.batch_size,
        "prompts": len(runs["none"].answers),
        "looping_answers": statistics.looping(statistics.token_ids(runs["none"].answers)),
        **session.about(),
    }
    session.report(found, markdown(found))
    session.say(aligned(comparison(found["schemes"])), *not_measured(found), *loops(found))
    session.say(f"written to {session.out}: report.md, results.json")


def variants(session: Session[Config], longest: int, left_out: Mapping[str, str]) -> dict[str, TimedRun]:
    """The draft in each scheme but those left out, and the exports in `also`. `longest`: as for `Session.engine`."""
    config, target = session.config, session.target
    schemes = [scheme for scheme in LABELS if scheme not in left_out]
    drafters = {scheme: session.drafter(Quant(scheme, config.scope)) for scheme in schemes}
    for name, path in export_names(config.also, session.artifact.source, str(config.draft.path)).items():
        drafters[name] = session.drafter(draft=load_draft(path, target.identity))
    options: dict[str, Any] = {"tree": config.tree, "max_batch_size": config.batch_size, "longest": longest}
    return {name: TimedRun(session.engine(one, **options), session.requests, one) for name, one in drafters.items()}


def measured(run: TimedRun, plain: TimedRun, config: Config) -> dict[str, Any]:
    """A scheme's figures, beside those of the draft as it is. Raises UserError where nothing was decoded.

    A round's drafting is the growth of the whole tree, LM head included: the paper's time to generate three tokens.
    Latencies are medians over the batches of questions, ratios those of the same batch.
    """
    tpc, before = (statistics.decoded_tpc(each.answers, config.max_tokens) for each in (run, plain))
    counts = [statistics.by_question(each.answers) for each in (run, plain)]
    stats = [answer.output.stats for answer in run.answers]
    pairs = [pair for pair in zip(run.drafting, plain.drafting, strict=True) if all(rounds for _, rounds in pair)]
    check(len(pairs) > 0, not_drafted(plain.engine, config.batch_size))
    own, other = ([seconds * 1e3 / rounds for seconds, rounds in drafting] for drafting in zip(*pairs, strict=True))
    answers = zip(run.answers, plain.answers, strict=True)
    return {
        "tpc": tpc,
        "tpc_interval": statistics.question_interval(counts[0]),
        "tpc_change": tpc / before - 1,
        "tpc_change_interval": statistics.change_interval(*counts),
        "tokens": sum(each.tokens for each in stats),
        "calls": sum(each.calls for each in stats),
        "acceptance_per_depth": statistics.acceptance(run.answers),
        "by_context": by_context(run.answers, run.engine.target.max_positions),
        "draft_latency_ms": median(own),
        "relative_draft_latency": statistics.median_ratio(own, other),
        "relative_draft_latency_interval": statistics.median_interval(list(map(truediv, own, other))),
        "feed_forward_bytes": feed_forward_bytes(run.draft),
        "differing_answers": sum(own.output.token_ids != other.output.token_ids for own, other in answers),
    }


def not_measured(found: Mapping[str, Any]) -> list[str]:
    """A line for each scheme that was not measured."""
    return [f"{LABELS[scheme]} is left out: {reason}." for scheme, reason in found["left_out"].items()]


def markdown(found: Mapping[str, Any]) -> str:
    """report.md."""
    config, schemes = found["config"], found["schemes"]
    setting = (
        f"{subject(found)}, {SCOPE[found['scope']]} in few bits; {found['tree']}; {sampling(config)}; batches of "
        f"{found['batch_size']}; {several(found['prompts'], 'prompt')} of {code(config['questions'])}."
    )
    differing = {name: each["differing_answers"] for name, each in schemes.items() if name != "none"}
    said = ", ".join(f"{LABELS.get(name) or plain(name)} {count}" for name, count in differing.items())
    notes = f"{NOTE}\n\nAnswers that differ from those with the draft as it is: {said}."
    text = "\n\n".join([setting, comparison(schemes), *not_measured(found), notes])
    along = contexts_beside({LABELS.get(name, name): each["by_context"] for name, each in schemes.items()})
    return document({"A draft in few bits": text, "By context": along, "Made on": made_on(found)})


if __name__ == "__main__":
    main()
