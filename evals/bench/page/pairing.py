"""Which results of OLD and NEW are of the same evaluation and config. DESIGN section 3.8.

A setting that OLD's config does not know was added since: OLD ran as today's default does, unless that setting changed
what was there before, so the page names it.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from omegaconf import OmegaConf

from eagle_train.cli import COMMANDS, composed
from eagle_train.fields import bases, defaults_of
from eagle_train.settings import CONF_DIR
from evals.bench.page.gather import TRAINING, Source
from evals.bench.page.shown import overrides
from evals.bench.suites import suite_of, values_of

_NAMES = {path.stem for path in (CONF_DIR / COMMANDS).glob("*.yaml")} - {"command"}  # with which all others begin
_COMMANDS = {name: name for name in _NAMES} | {TRAINING: "train"}
_DRAFTERS = {path.stem: path for path in (CONF_DIR / "drafter").glob("*.yaml")}
Settings = Mapping[str, str]  # dotted keys, and values as they are typed


def pairs(old: Sequence[Source], new: Sequence[Source]) -> tuple[list[tuple[Source, Source]], list[str], list[Source]]:
    """Results of the same evaluation and config, why each other one of NEW has no pair, and the others of OLD."""
    found, alone, left = [], [], list(old)
    for source in new:
        same = [each for each in left if each.evaluation == source.evaluation]
        match = next((each for each in same if not different(each, source)), None)
        if match is not None:
            left.remove(match)
            found.append((match, source))
            continue
        if not same:
            alone.append(f"{source.name}: no result of evals.{source.evaluation} is in OLD.")
            continue
        alone.append(
            f"{source.name}: made with another config than {same[0].name}: {', '.join(different(same[0], source))}."
        )
    return found, alone, left


def different(old: Source, new: Source) -> list[str]:
    """The settings in which two configs differ; where results are written is none, and `added` ones are not."""
    mine, theirs = _settings(old), _settings(new)
    keys = (key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    return sorted(set(keys) - set(added(old, new)))


def added(old: Source, new: Source) -> list[str]:
    """The settings that OLD's config lacks and that have today's default in NEW."""
    mine, theirs = _settings(old), _settings(new)
    keys = [key for key in theirs if key not in mine and _lacks(old.config, key)]
    usual = _defaults(new) if keys else {}
    return sorted(key for key in keys if key in usual and _is_same(theirs[key], usual[key]))


def told(old: Source, new: Source) -> list[str]:
    """A line on `added`, if there are some."""
    values = _settings(new)
    said = ", ".join(f"{key}={values[key]}" for key in added(old, new))
    return [f"{new.name}: OLD's config has no {said}: today's default, taken as what OLD ran with."] if said else []


def _settings(source: Source) -> Settings:
    return dict(overrides({key: value for key, value in source.config.items() if key != "out"}))


def _lacks(config: Any, key: str) -> bool:
    """Whether a config has nothing at a dotted key, null included."""
    for name in key.split("."):
        if not isinstance(config, Mapping) or name not in config:
            return True
        config = config[name]
    return False


def _is_same(value: str, usual: str) -> bool:
    return value == usual or _number(value) == _number(usual) is not None


def _number(text: str) -> float | None:
    """A dataclass's float may stand as a whole number in a YAML."""
    return float(text) if text.lstrip("-").replace(".", "", 1).isdecimal() else None


def _defaults(source: Source) -> Settings:
    """Today's defaults of the command that made a result, with those of its suite, drafter and kind of draft."""
    config, found = source.config, dict(_of_command(source.evaluation))
    if (suite := suite_of(config.get("suite"))) is not None:
        found |= overrides({"suite": values_of(suite)})
    drafter, draft = source.found.get("drafter"), config.get("draft")
    if isinstance(drafter, str) and drafter in _DRAFTERS:
        found |= overrides({"drafter": OmegaConf.to_container(OmegaConf.load(_DRAFTERS[drafter]))})
    kind = f"fields_{draft.get('kind')}" if isinstance(draft, Mapping) else ""
    if ("draft", kind) in bases():
        found |= overrides({"draft": defaults_of("draft", kind)})
    return found


@cache
def _of_command(evaluation: str) -> Settings:
    """None of an evaluation without a YAML."""
    if evaluation not in _COMMANDS:
        return {}
    return dict(overrides(OmegaConf.to_container(composed(f"{COMMANDS}/{_COMMANDS[evaluation]}", []))))
