"""What is checked of a drafter's options before a weight of the target is loaded, which may take minutes.

A maker of drafters names a function for it with `checked_early`; all else is told when the drafter is made. Knows
nothing of any drafter.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from eagle_train.artifacts.format import check_sizes, read_artifact
from eagle_train.models.loading import TargetConfig
from eagle_train.settings import call, keys_of, named

Maker = TypeVar("Maker", bound=Callable[..., Any])

_MARK = "check_early"


def checked_early(check: Callable[..., Any] | None = None) -> Callable[[Maker], Maker]:
    """Mark a class or function that makes drafters, one that a YAML may name: `check` is called with the same keys.

    Its `target` is the TargetConfig, and `draft` the directory of the draft or None. It raises UserError, and may
    return what it likes. None: the maker itself, which reads nothing of target and draft but that there is one.
    """

    def mark(maker: Maker) -> Maker:
        setattr(maker, _MARK, maker if check is None else check)
        return maker

    return mark


def check_early(spec: Mapping[str, Any], target: TargetConfig, draft: str | None, place: str = "draft") -> None:
    """Raise UserError for a draft's directory, the setting `place`, that is no draft for a target of these sizes, and
    for what the maker of `spec`, of `drafter_spec`, checks early. Reads configs and tokenizers, and no weights."""
    if draft is not None:
        check_sizes(read_artifact(draft).target, target, f"{place}={draft}")
    what = f"drafter {spec['_target_']}"
    check = getattr(named(str(spec["_target_"]), what), _MARK, None)
    if check is not None:
        call(check, what, keys_of(spec) | {"target": target, "draft": draft})
