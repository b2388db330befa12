"""How long tokens take: over batch sizes, contexts and trees, against plain decoding and `transformers.generate`.

All variants answer the same batches in turn; where the time of a round goes is measured afterwards, on other rounds.
Paper sections 2.4, 3.3 and figure 4b; DESIGN sections 3.8 and 3.10.

    python -m evals.latency draft=DIR batch_sizes=[1,2,4] context_lengths=[512,1024] trees=[chain3] out=DIR
    python -m evals.latency drafter=ngram batch_sizes=[1,2,4] out=DIR
    python -m evals.latency shapes=llama3_1_8b acceptance=[0.8,0.65,0.55] context_lengths=[2048] out=DIR
    python -m evals.latency shapes=llama3_3_70b context_lengths=[2048] cluster.gpus=8 plan=true
"""

from typing import Any

from omegaconf import DictConfig

from eagle_train.distributed import check_alone
from eagle_train.errors import check
from eagle_train.inference import Dispatcher, Engine, SimulatedAcceptance
from eagle_train.inference.drafters import drafter_name
from eagle_train.settings import build
from evals.bench import copy_bound
from evals.bench.baselines import Transformers, stock_model
from evals.bench.copy_bound import beside_the_copy_bound
from evals.bench.decoding_plan_text import plan_of, plan_text
from evals.bench.evaluation import evaluation
from evals.bench.latency_config import Config
from evals.bench.latency_report import markdown, profile_text, summary
from evals.bench.profiled_rounds import profiles, tokens_of
from evals.bench.random_models import described, random_models
from evals.bench.report import first_of
from evals.bench.requests import PromptSource, deepest_of
from evals.bench.session import Session
from evals.bench.sweep import LOOKUP, PLAIN, TRANSFORMERS, Batch, Variants, sweep
from evals.bench.trees import tree_names


@evaluation("latency")
def main(values: DictConfig) -> None:
    config = build(Config, values, "")
    if config.plan:
        check_alone("evals.latency plan=true")
        print(plan_text(config))
        return
    session = open_session(config)
    prompts = PromptSource(session.requests, session.questions, config.params)
    tables = [tree for tree in config.trees if tree.endswith(".yaml")]
    about: dict[str, Any] = {"tables": {path: tree_names(Dispatcher(path), max(config.batch_sizes)) for path in tables}}
    about["drafter"] = drafter_name(config.spec)
    if config.shapes is not None:
        about["target"] = described(session.target)
    longest = prompts.longest(config.context_lengths)
    compared = variants(session, longest)
    for cells in sweep(config, prompts, compared, session.world):  # each is written at once: a later one may fail
        found = {**cells, **session.about(), **about}
        session.report(found, markdown(found))
    session.say(summary(found))
    if config.profile:
        found["profiles"] = profiles(config, prompts, compared, session.out if session.world.is_main else None)
        session.report(found, markdown(found))
        session.say(profile_text(found))
    if config.shapes is not None and session.device == "cuda":
        tell_copy_bound(session, found)
    session.say(f"written to {session.out}: report.md, results.json" + (", traces" if config.profile else ""))
    check(not found["left_out"], first_of(found["left_out"]))


def tell_copy_bound(session: Session[Config], found: dict[str, Any]) -> None:
    """Add it to `found` and what was written, and print it."""
    plan = plan_of(session.config, session.world.size)
    found["copy_bound"] = beside_the_copy_bound(plan, session.config, found)
    session.report(found, markdown(found))
    session.say(copy_bound.text(found["copy_bound"], plan))


def open_session(config: Config) -> Session[Config]:
    """With random models where there are shapes."""
    session = Session(config)
    if config.shapes is not None:
        given = config.shapes, config.draft, session.device, config.seed
        session.target, session.draft = random_models(*given, session.world)
    return session


def variants(session: Session[Config], longest: int) -> Variants:
    """Plain decoding, each tree with each quantised draft, and, if asked, transformers with and without prompt lookup.

    `longest`: the most tokens of a prompt and its answer."""
    config = session.config
    model = stock_model(session.target) if config.transformers else None
    acceptance = None if config.acceptance is None else SimulatedAcceptance(config.acceptance)

    def engines(batch_size: int) -> dict[str, Engine]:
        made = {PLAIN: session.engine(max_batch_size=batch_size, longest=_with_profile(session, longest, 0))}
        for name, (tree, quant) in config.drafters.items():
            drafter = session.chosen_drafter(quant)
            most = _with_profile(session, longest, deepest_of(tree, drafter))
            made[name] = session.engine(drafter, tree, longest=most, acceptance=acceptance, max_batch_size=batch_size)
        return made

    def baselines(batch: Batch) -> dict[str, Transformers]:
        if model is None:
            return {}
        stops, together = session.requests.stop_ids, session.target.together
        made = {TRANSFORMERS: Transformers(model, stops, together=together)}
        if len(batch) == 1:  # its prompt lookup is for single prompts
            made[LOOKUP] = Transformers(model, stops, config.prompt_lookup, together=together)
        for baseline in made.values():
            baseline.tune(batch)
        return made

    return Variants(engines, baselines)


def _with_profile(session: Session[Config], longest: int, deepest: int) -> int:
    """The most tokens of a text, with those of a profile's rounds if there is one; `deepest`: of drafts."""
    config = session.config
    if not config.profile:
        return longest
    more = tokens_of([longest] * max(config.batch_sizes), config.options.prefill_tokens, deepest)
    return min(longest + more, session.target.max_positions)


if __name__ == "__main__":
    main()
