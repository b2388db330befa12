"""How long tokens take: over batch sizes, contexts and trees, against plain decoding and `transformers.generate`.

All variants answer the same batches in turn; where the time of a round goes is measured afterwards, on other rounds.
Paper sections 2.4, 3.3 and figure 4b; DESIGN sections 3.8 and 3.10.

    python -m evals.latency draft=DIR batch_sizes=[1,2,4] context_lengths=[512,1024] trees=[chain3] out=DIR
    python -m evals.latency drafter=ngram batch_sizes=[1,2,4] out=DIR
    python -m evals.latency shapes=llama3_1_8b acceptance=[0.8,0.65,0.55] context_lengths=[2048] out=DIR
"""

from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from eagle_train.errors import check
from eagle_train.inference import Dispatcher, Engine, SimulatedAcceptance
from eagle_train.inference.drafters import drafter_name
from eagle_train.models.loading import TargetConfig
from eagle_train.settings import build
from evals.bench.baselines import Transformers, stock_model
from evals.bench.config import check_least
from evals.bench.evaluation import evaluation
from evals.bench.latency_report import markdown, profile_text, summary
from evals.bench.profiled_rounds import profiles, tokens_of
from evals.bench.random_models import RandomDraftOptions, ShapesConfig, check_random, described, random_models
from evals.bench.requests import PromptSource
from evals.bench.session import Session
from evals.bench.sweep import LOOKUP, PLAIN, TRANSFORMERS, Batch, SweepConfig, Variants, sweep
from evals.bench.trees import tree_names


@dataclass(kw_only=True)
class Config(SweepConfig):
    """conf/commands/latency.yaml, which says what each key is. Raises UserError for values that cannot be."""

    # This evaluation alone has neither where its models are random.
    target: TargetConfig | None = None  # type: ignore[assignment]
    questions: str | None  # type: ignore[assignment]
    draft: RandomDraftOptions
    ignore_eos: bool
    transformers: bool
    prompt_lookup: int
    profile: bool
    shapes: ShapesConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "prompt_lookup")
        self.check_models()
        unknown = self.questions is None and self.context_lengths is None
        check(not unknown, "context_lengths is needed: random tokens have no length of their own; give [512], say")
        self.params = replace(self.params, ignore_eos=self.ignore_eos)

    def check_models(self) -> None:
        """A checkpoint and a draft, or shapes and their acceptance; and trees that draft."""
        deepest = [Dispatcher(tree).deepest for tree, _ in self.drafters.values()]
        drafts = min(deepest, default=0) > 0
        check(drafts, f"trees={self.trees}: must be trees that draft; plain decoding is always there")
        quants = [quant for _, quant in self.drafters.values()]
        if self.shapes is None:
            check(self.target is not None, "target is needed: give target=DIR, or shapes")
            told = "draft is needed: give draft=DIR, or shapes, or drafter=ngram, say"
            check(self.draft.path is not None or not self.is_eagle, told)
            self.check_draft(*quants)
            self.draft.check_read()
            check(self.acceptance is None, f"acceptance={self.acceptance}: needs shapes; a real draft has its own")
            return
        for name, value in (("target", self.target), ("draft.path", self.draft.path), ("questions", self.questions)):
            check(value is None, f"{name}: leave it out with shapes, whose weights and prompts are random")
        check(self.is_eagle, f"drafter={drafter_name(self.spec)}: leave it out with shapes, whose draft is random")
        check(self.relaxed_topk == 0, f"relaxed_topk={self.relaxed_topk}: leave it out with shapes, which simulate it")
        check_random(self.acceptance or [], max(deepest), f"acceptance={self.acceptance}", f"trees={self.trees}")


@evaluation("latency")
def main(values: DictConfig) -> None:
    session = open_session(build(Config, values, ""))
    config = session.config
    prompts = PromptSource(session.requests, session.questions, config.params)
    tables = [tree for tree in config.trees if tree.endswith(".yaml")]
    about: dict[str, Any] = {"tables": {path: tree_names(Dispatcher(path), max(config.batch_sizes)) for path in tables}}
    about["drafter"] = drafter_name(config.spec)
    if config.shapes is not None:
        about["target"] = described(session.target)
    longest = prompts.longest(config.context_lengths)
    if config.profile:
        deepest = max(Dispatcher(tree).deepest for tree in config.trees)
        more = tokens_of([longest] * max(config.batch_sizes), config.options.prefill_tokens, deepest)
        longest = min(longest + more, session.target.max_positions)
    compared = variants(session, longest)
    for cells in sweep(config, prompts, compared):  # each is written at once: a later one may fail
        found = {**cells, **session.about(), **about}
        session.report(found, markdown(found))
    session.say(summary(found))
    if config.profile:
        found["profiles"] = profiles(config, prompts, compared, session.out if session.world.is_main else None)
        session.report(found, markdown(found))
        session.say(profile_text(found))
    session.say(f"written to {session.out}: report.md, results.json" + (", traces" if config.profile else ""))


def open_session(config: Config) -> Session[Config]:
    """With random models where there are shapes."""
    session = Session(config)
    if config.shapes is not None:
        given = config.shapes, config.draft, session.device, config.seed
        session.target, session.draft = random_models(*given, session.world)
    return session


def variants(session: Session[Config], longest: int) -> Variants:
    """Plain decoding, each tree with each quantised draft, and, if asked, transformers with and without prompt lookup.

    `longest`: as for `Session.engine`."""
    config = session.config
    model = stock_model(session.target) if config.transformers else None
    acceptance = None if config.acceptance is None else SimulatedAcceptance(config.acceptance)

    def engines(batch_size: int) -> dict[str, Engine]:
        options: dict[str, Any] = {"max_batch_size": batch_size, "longest": longest}
        made = {PLAIN: session.engine(**options)}
        for name, (tree, quant) in config.drafters.items():
            made[name] = session.engine(session.chosen_drafter(quant), tree, acceptance=acceptance, **options)
        return made

    def baselines(batch: Batch) -> dict[str, Transformers]:
        if model is None:
            return {}
        made = {TRANSFORMERS: Transformers(model, session.requests.stop_ids)}
        if len(batch) == 1:  # its prompt lookup is for single prompts
            made[LOOKUP] = Transformers(model, session.requests.stop_ids, config.prompt_lookup)
        for baseline in made.values():
            baseline.tune(batch)
        return made

    return Variants(engines, baselines)


if __name__ == "__main__":
    main()
