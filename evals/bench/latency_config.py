"""The settings of evals.latency, checked in one place. Knows nothing of what is measured."""

from dataclasses import dataclass, replace

from eagle_train.errors import check
from eagle_train.inference import Dispatcher
from eagle_train.inference.drafters import drafter_name
from eagle_train.models.loading import TargetConfig
from eagle_train.training.cost.estimate import ClusterConfig
from evals.bench.baselines import check_has
from evals.bench.config import check_least
from evals.bench.random_models import RandomDraftOptions, ShapesConfig, check_random
from evals.bench.sweep import SweepConfig


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
    plan: bool
    cluster: ClusterConfig
    shapes: ShapesConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "prompt_lookup")
        self.check_models()
        unknown = self.questions is None and self.context_lengths is None
        check(not unknown, "context_lengths is needed: random tokens have no length of their own; give [512], say")
        if self.transformers:
            check_has(self.params, "leave it out, or give transformers=false")
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
            check(not self.plan, "plan=true: needs shapes, of which it is; give shapes=llama3_1_8b, say")
            return
        own = {"target": None if self.target is None else self.target.path, "draft": self.draft.path}
        for name, value in (own | {"questions": self.questions}).items():
            check(value is None, f"{name}={value}: leave it out with shapes, whose weights and prompts are random")
        check(self.is_eagle, f"drafter={drafter_name(self.spec)}: leave it out with shapes, whose draft is random")
        check(self.relaxed_topk == 0, f"relaxed_topk={self.relaxed_topk}: leave it out with shapes, which simulate it")
        if self.plan:
            check(self.quants == ["none"], f"quants={self.quants}: leave it out with plan=true, of drafts as they are")
            auto = any(Dispatcher(tree).auto for tree, _ in self.drafters.values())
            check(not auto, f"trees={self.trees}: plan=true needs trees of a size that is known; leave auto out")
        if not self.plan or self.acceptance is not None:
            check_random(self.acceptance or [], max(deepest), f"acceptance={self.acceptance}", f"trees={self.trees}")
