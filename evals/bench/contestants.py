"""The drafters of a comparison: what each is made of, and its tree, from a mapping of names to options.

Knows nothing of tasks or measurements.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle_train.artifacts.format import Artifact, load_draft, read_artifact
from eagle_train.errors import check, shown
from eagle_train.fields import REQUIRED
from eagle_train.inference import Dispatcher, Drafter
from eagle_train.inference.drafters import drafter_spec, is_eagle
from eagle_train.inference.drafters.early import check_early
from eagle_train.inference.options import DraftOptions
from eagle_train.models.loading import TargetConfig
from eagle_train.models.target import Target
from eagle_train.settings import CONF_DIR
from evals.bench.naming import by_name
from evals.bench.session import made_drafter
from evals.bench.sweep import PLAIN, TRANSFORMERS

_OWN = ("file", "mine")  # options of the group that name nothing themselves
_KEYS = ("drafter", "draft", "tree")  # of an entry; all others are the drafter's


@dataclass(frozen=True)
class Contestant:
    """`spec`: of `drafter_spec`. `draft`: an artifact's directory. `is_prepared`: whether something must be there
    before it drafts, a trained draft or an index, say."""

    name: str
    spec: Mapping[str, Any]
    tree: Any
    draft: str | None
    is_prepared: bool

    @property
    def artifact(self) -> Artifact | None:
        """What the draft's directory says of it."""
        return None if self.draft is None else read_artifact(self.draft)

    def check_early(self, target: TargetConfig) -> None:
        """Raise UserError for what can be told before the target is loaded, see `check_early`."""
        check_early(self.spec, target, self.draft, f"drafters.{self.name}.draft")

    def made(self, target: Target) -> tuple[Drafter, float]:
        """A new drafter, and how many seconds it took to make it. Raises UserError."""
        started = time.perf_counter()
        draft = None if self.draft is None else load_draft(self.draft, target.identity)
        return made_drafter(self.spec, target, draft), time.perf_counter() - started

    def about(self) -> dict[str, Any]:
        """For results.json."""
        artifact = self.artifact
        return {
            "name": self.name,
            "drafter": self.spec["_target_"],
            "options": {key: value for key, value in self.spec.items() if key != "_target_"},
            "draft": self.draft,
            "draft_source": None if artifact is None else artifact.source,
            "training": None if artifact is None else artifact.training,
            "is_prepared": self.is_prepared,
        }


def contestants(given: Any, tree: Any) -> list[Contestant]:
    """The drafters of a mapping of names to options, of a list of names, or of None: all that need no preparation.

    An option is a key of the drafter, or `drafter` (an option of conf/drafter or FILE.yaml; else the name is one),
    `draft` (an artifact's directory) or `tree` (in place of `tree`). Raises UserError; loads no weight.
    """
    entries = _entries(_ready() if given is None else given)
    check(bool(entries), "drafters is empty: give names, [ngram], say, or a mapping of names to options")
    return [_contestant(name, options, tree) for name, options in entries.items()]


def _entries(given: Any) -> dict[str, dict[str, Any]]:
    wrong = f"drafters={shown(given)}: must be a mapping of names to options, or a list of names"
    if isinstance(given, list):
        check(all(isinstance(name, str) for name in given), wrong)
        named = by_name(given, lambda name: Path(name).stem, "drafters")
        given = {name: {"drafter": option} for name, option in named.items()}
    check(isinstance(given, Mapping), wrong)
    for name, options in given.items():
        right = options is None or isinstance(options, Mapping)
        check(right, f"drafters.{name}={shown(options)}: must be a mapping of options, or null")
        taken = str(name) == PLAIN or str(name).startswith(TRANSFORMERS)
        check(not taken, f"drafters.{name}: is always measured; give another name")
    return {str(name): dict(options or {}) for name, options in given.items()}


def _ready() -> list[str]:
    """The options of conf/drafter that need no preparation."""
    return [name for name in _options() if not _needs_preparation(_described(name))]


def _options() -> list[str]:
    return sorted(path.stem for path in CONF_DIR.glob("drafter/*.yaml") if path.stem not in _OWN)


def _described(option: str) -> dict[str, Any]:
    """What a YAML of conf/drafter says."""
    found: Any = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "drafter" / f"{option}.yaml"))
    return found


def _needs_preparation(described: Mapping[str, Any]) -> bool:
    return REQUIRED in described.values() or is_eagle(described)


def _contestant(name: str, options: dict[str, Any], tree: Any) -> Contestant:
    own = {key: value for key, value in options.items() if key not in _KEYS}
    option = options.get("drafter", name)
    said = f"drafters.{name}.drafter={shown(option)}: must be one of conf/drafter, or FILE.yaml"
    check(isinstance(option, str), said)
    spec, is_prepared = _spec(name, option, own)
    draft, tree = options.get("draft"), options.get("tree", tree)
    check(draft is None or isinstance(draft, str), f"drafters.{name}.draft={shown(draft)}: must be a directory")
    wanted = "must name what eagle-export wrote, {draft: DIR, ...}"
    check(draft is not None or not is_eagle(spec), f"drafters.{name}.draft is needed: {wanted}")
    if draft is not None:
        read_artifact(draft)
    check(
        Dispatcher(tree).deepest > 0, f"drafters.{name}.tree={shown(tree)}: must draft; plain decoding is always there"
    )
    return Contestant(name, spec, tree, draft, is_prepared or draft is not None)


def _spec(name: str, option: str, own: dict[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """What is called to make the drafter, and whether that needs preparation, as far as its YAML says."""
    if "_target_" in own or "file" in own or option.endswith(".yaml"):
        given = {"file": option, **own} if option.endswith(".yaml") else own
        return _plain(drafter_spec(given)), False
    known = f"there are {', '.join(_options())}; or give drafter: FILE.yaml, or _target_"
    check(option in _options(), f"drafters.{name}: no drafter {option}; {known}")
    described = _described(option)
    for key in own:
        right = ", ".join(each for each in described if each != "_target_")
        check(key in described, f"drafters.{name}.{key}: {option} has no such option; it has {right}")
    merged = described | own
    for key, value in merged.items():
        check(value != REQUIRED, f"drafters.{name}.{key} is needed: give {name}: {{{key}: VALUE}}")
    return _plain(drafter_spec(merged)), _needs_preparation(described)


def _plain(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """A spec as a dict; what its YAML takes from a command's `draft` has its default."""
    raw: Any = OmegaConf.to_container(spec) if OmegaConf.is_config(spec) else dict(spec)
    root = OmegaConf.create({"draft": {"alignment": DraftOptions.alignment}, "drafter": raw})
    found: Any = OmegaConf.to_container(root.drafter, resolve=True)
    return found
