"""What an experiment compares: variants of a training or of decoding, for how long, with which seeds and trees.

Knows nothing of how drafts are trained, decoded or shown.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_train.artifacts.format import read_artifact
from eagle_train.errors import check
from eagle_train.inference import Dispatcher, SamplingParams
from eagle_train.inference.requests.sampling_keys import KEYS, SamplingKeys
from eagle_train.settings import CONF_DIR, build
from evals.bench.config import check_decodes, check_least, check_sizes
from evals.bench.questions import Question
from evals.bench.study_decoding import Decoding, decoding_of

EQUALS = ("time", "tokens")
GIVEN = "draft"  # what is equal where no draft is trained


@dataclass(frozen=True)
class Trained:
    """A draft of a study: the variant, its own steps, and the seed; None: of the draft that is given."""

    variant: str
    steps: int
    seed: int | None

    def __str__(self) -> str:
        return f"{self.variant}-{self.steps}-{'given' if self.seed is None else self.seed}"


@dataclass
class Study:
    """conf/study, which says what each key is. Raises UserError for values that cannot be."""

    name: str
    base: list[str]
    reference: str
    variants: dict[str, list[str]]
    steps: list[int]
    equal: list[str]
    trees: dict[str, Any]
    decoding: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(len(self.variants) > 0, "study.variants={}: give at least one")
        known = ", ".join(self.variants)
        check(self.reference in self.variants, f"study.reference={self.reference}: is none of {known}")
        for name in self.decoding:
            check(name in self.variants, f"study.decoding.{name}: is none of the variants {known}")
        check_sizes("study.steps", self.steps)
        right = bool(self.equal) and all(each in EQUALS for each in self.equal)
        check(right, f"study.equal={self.equal}: must be a list of {' and '.join(EQUALS)}")
        check(len(self.trees) > 0, "study.trees={}: give at least one")
        for name, tree in self.trees.items():  # raises for what is no tree
            check(Dispatcher(tree).deepest > 0, f"study.trees.{name}={tree}: drafts nothing; try chain3")


@dataclass
class GivenDraft:
    """`path`: a directory that eagle-export wrote; None: drafts are trained."""

    path: str | None


@dataclass(kw_only=True)
class StudyConfig(SamplingKeys):
    """conf/commands/experiments.yaml, which says what each key is. Raises UserError for values that cannot be.

    `chosen`: the variants that take part, the reference among them, since all are compared with it. With `draft`
    nothing is trained: the study has one length, which is the draft's, and no seeds. The keys of sampling are those of
    all variants; `study.decoding` has a variant's own. `target`, `asked`: see `follow_from`.
    """

    study: Any
    draft: GivenDraft
    seeds: list[int]
    only: list[str] | None
    rounds: int
    timed_steps: int
    questions: str
    limit: int | None
    max_tokens: int
    batch_size: int
    timed_questions: int
    plan: bool
    device: str
    out: str

    def __post_init__(self) -> None:
        self.study = build(Study, self.study, "study")
        check_least(self, 1, "rounds", "timed_steps", "batch_size")
        check_least(self, 0, "timed_questions")
        self.target = self.asked = ""
        check(len(self.seeds) > 0, "seeds=[]: give at least one")
        check_decodes(self.max_tokens)
        self.sampling_params(max_tokens=self.max_tokens)
        shared = {key: getattr(self, key) for key in KEYS}
        for name, own in self.study.decoding.items():
            self.study.decoding[name] = decoding_of(own, shared, f"study.decoding.{name}", self.max_tokens)
        self._shared = Decoding(**shared)
        names = self.study.variants
        for name in self.only or []:
            check(name in names, f"only={self.only}: {name} is none of {', '.join(names)}")
        self.chosen = [name for name in names if name == self.study.reference or name in (self.only or names)]
        if self.draft.path is not None:
            self._use_draft(self.draft.path)

    def _use_draft(self, draft: str) -> None:
        for name in self.chosen:
            own = self.study.variants[name]
            said = f"draft={draft}: {name} is trained otherwise ({' '.join(own)}); leave draft out, or choose others"
            check(self.overrides(name) == self.overrides(self.study.reference), f"{said} with only")
        self.study.steps = [read_artifact(draft).training.get("steps", 0)]
        self.study.equal, self.seeds = [GIVEN], [0]

    def follow_from(self, target: str, questions: list[Question]) -> None:
        """Results that are kept are those of this target, a fingerprint, and of these questions, whatever their paths
        say."""
        self.target = target
        self.asked = hashlib.sha256(repr(questions).encode()).hexdigest()[:16]

    def overrides(self, name: str) -> list[str]:
        """A variant's overrides of eagle-train."""
        return [*self.study.base, *self.study.variants[name], f"device={self.device}"]

    @property
    def trainings(self) -> list[str]:
        """The variants that are trained, one for all that are trained alike; none where a draft is given."""
        return [] if self.draft.path is not None else [*dict.fromkeys(map(self.trained_as, self.chosen))]

    def trained_as(self, name: str) -> str:
        """The first variant that is trained alike: they share its draft."""
        own = self.study.variants[name]
        return next(other for other, theirs in self.study.variants.items() if theirs == own)

    def draft_run(self, run: Trained) -> Trained:
        """The training that a variant's draft comes from."""
        return replace(run, variant=self.trained_as(run.variant))

    def decoding(self, name: str) -> Decoding:
        """How a variant decodes."""
        return self.study.decoding.get(name) or self._shared

    def sampling(self, name: str) -> SamplingParams:
        """How a variant's answers are sampled; each question's has a seed of its own, the same for all variants."""
        return self.decoding(name).sampling_params(max_tokens=self.max_tokens, seed=0)

    def own_steps(self, steps: int, equal: str, timing: Mapping[str, Any]) -> int:
        """A variant's steps where the reference makes `steps`. `timing`: of its step, see `study_runs.cost`."""
        low, high = timing["interval"] or (timing["ratio"], timing["ratio"])
        ratio = timing["ratio"] if equal == "time" and not low <= 1 <= high else 1.0
        return max(1, round(steps / ratio))


def check_name(name: str, chosen: str) -> None:
    """Raise UserError where the study that was chosen is called by the name of another one of conf/study."""
    others = {path.stem for path in CONF_DIR.glob("study/*.yaml")} - {chosen}
    said = f"study.name={name}: is another study than {chosen}, which would run under its name; give study={name}"
    check(name not in others, said)


def part_title(part: Mapping[str, Any]) -> str:
    """What is the same for all variants of a part of the results."""
    return "the draft as given" if part["equal"] == GIVEN else f"{part['steps']:,} steps, equal {part['equal']}"
