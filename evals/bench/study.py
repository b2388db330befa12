"""What an experiment compares: variants of a training, for how long, with which seeds, decoded with which trees.

Knows nothing of how drafts are trained, decoded or shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_train.errors import check
from eagle_train.inference import Dispatcher, SamplingParams
from eagle_train.settings import build
from evals.bench.config import check_decodes, check_least, check_sizes

EQUALS = ("time", "tokens")


@dataclass(frozen=True)
class Trained:
    """A draft of a study: the variant, its own steps, and the seed."""

    variant: str
    steps: int
    seed: int

    def __str__(self) -> str:
        return f"{self.variant}-{self.steps}-{self.seed}"


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

    def __post_init__(self) -> None:
        check(len(self.variants) > 0, "study.variants={}: give at least one")
        known = ", ".join(self.variants)
        check(self.reference in self.variants, f"study.reference={self.reference}: is none of {known}")
        check_sizes("study.steps", self.steps)
        right = bool(self.equal) and all(each in EQUALS for each in self.equal)
        check(right, f"study.equal={self.equal}: must be a list of {' and '.join(EQUALS)}")
        check(len(self.trees) > 0, "study.trees={}: give at least one")
        for name, tree in self.trees.items():  # raises for what is no tree
            check(Dispatcher(tree).deepest > 0, f"study.trees.{name}={tree}: drafts nothing; try chain3")


@dataclass
class StudyConfig:
    """conf/commands/experiments.yaml, which says what each key is. Raises UserError for values that cannot be.

    `chosen`: the variants that take part, the reference among them, since all are compared with it.
    """

    study: Any
    seeds: list[int]
    only: list[str] | None
    rounds: int
    timed_steps: int
    questions: str
    limit: int | None
    max_tokens: int
    batch_size: int
    timed_questions: int
    device: str
    out: str

    def __post_init__(self) -> None:
        self.study = build(Study, self.study, "study")
        check_least(self, 1, "rounds", "timed_steps", "batch_size")
        check_least(self, 0, "timed_questions")
        check(len(self.seeds) > 0, "seeds=[]: give at least one")
        check_decodes(self.max_tokens)
        names = self.study.variants
        for name in self.only or []:
            check(name in names, f"only={self.only}: {name} is none of {', '.join(names)}")
        self.chosen = [name for name in names if name == self.study.reference or name in (self.only or names)]
        self.params = SamplingParams(temperature=0.0, max_tokens=self.max_tokens)

    def overrides(self, name: str) -> list[str]:
        """A variant's overrides of eagle-train."""
        return [*self.study.base, *self.study.variants[name], f"device={self.device}"]

    def own_steps(self, steps: int, equal: str, timing: Mapping[str, Any]) -> int:
        """A variant's steps where the reference makes `steps`. `timing`: of its step, see `study_runs.cost`."""
        low, high = timing["interval"] or (timing["ratio"], timing["ratio"])
        ratio = 1.0 if equal == "tokens" or low <= 1 <= high else timing["ratio"]
        return max(1, round(steps / ratio))
