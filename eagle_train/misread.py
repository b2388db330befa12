"""Which override of a command Hydra refuses, and what would be right, in words of our own.

Knows the keys and the options that there are, and nothing of what they mean. DESIGN section 3.10.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from eagle_train.errors import did_you_mean, typed
from eagle_train.fields import FIELDS
from eagle_train.settings import CONF_DIR
from eagle_train.tree_names import ANY_TREE, TREES, tree_of

KEY = re.compile(r"(\+{0,2}|~)[\w-]+(\.[\w-]+)*")
HELP = "(--help tells the keys)"
# Keys that have a short name, see `cli.named_path`.
SHORT = {"target.path": "target", "draft.path": "draft", "tree.table": "tree", "drafter.file": "drafter"}
BESIDE = {  # what a group takes besides its YAMLs
    "target": "or a directory or hub id",
    "tree": f"or {ANY_TREE}, or FILE.yaml",
    "drafter": "or FILE.yaml",
}

Composed = Callable[[list[str]], DictConfig]


def misread(overrides: list[str], compose: Composed) -> str | None:
    """What is wrong with the first override that does not fit; None where nothing is found.

    `compose`: a command's config with overrides that are known to be right, Hydra's own part included.
    """
    for override in overrides:
        if told := _malformed(override):
            return told
    parser = OverridesParser.create()
    parsed = [parser.parse_override(override) for override in overrides]
    own = [each for each in parsed if not each.key_or_group.startswith("hydra")]  # Hydra's own settings are not ours
    groups = {name for name in compose([]).hydra.runtime.choices if not name.startswith("hydra/")}
    chosen = []
    for each in own:
        if each.key_or_group not in groups or isinstance(each.value(), dict):
            continue
        if told := _wrong_choice(each):
            return told
        if not each.is_delete():
            chosen.append(str(each.input_line))
    # `target=X` is `target=hf target.path=X` by now; the second tells what was typed.
    short = {SHORT.get(each.key_or_group) for each in own if not (each.is_add() or each.is_force_add())}
    own = [each for each in own if each.key_or_group not in short]
    keys = _Keys.of(compose(chosen), groups)
    return next((told for each in own if (told := keys.refusal(each))), None)


def added(overrides: list[str], compose: Composed) -> str | None:
    """What is wrong with the first override that adds a key beside all that a command reads, which Hydra takes."""
    roots = {override: re.split(r"[.=]", override.lstrip("+"))[0] for override in overrides if override[:1] == "+"}
    roots = {override: root for override, root in roots.items() if not is_group(root)}
    if not roots:
        return None
    keys = _Keys.of(compose([]), set())
    wrong = next(((each, root) for each, root in roots.items() if root not in keys.known), None)
    return None if wrong is None else f"{wrong[0]}: no such key{keys.nearest(wrong[1])} {HELP}"


def _malformed(override: str) -> str | None:
    """What is wrong with an override that Hydra cannot parse."""
    key, equals, value = override.partition("=")
    if not KEY.fullmatch(key) or (not equals and not key.startswith("~")):
        said = override if not equals else f"{key}={value.strip(chr(39))}"  # without the quotes of `cli.as_typed`
        return f"{said}: must be KEY=VALUE, where the parts of KEY are words with dots between {HELP}"
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return f"{override}: its value cannot be read; a text with brackets, quotes or commas stands in quotes"
    return None


def is_group(key: str) -> bool:
    """Whether a key is that of a choice, of this command or another."""
    return (CONF_DIR / key).is_dir()


def options_of(group: str) -> list[str]:
    """What a group's key can be, but for trees that are known by their names."""
    files = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml") if path.stem != "base")
    return sorted({*files, *TREES}) if group == "tree" else files


def one_of(group: str, value: str) -> str:
    """What a group's key must be, and which option is nearest to a value."""
    options = options_of(group)
    also = f", {BESIDE[group]}" if group in BESIDE else ""
    return f"must be one of {', '.join(options)}{also}{did_you_mean(value, options)}"


def _wrong_choice(override: Override) -> str | None:
    """What is wrong with the choice of a group's option."""
    group, value = override.key_or_group, override.value()
    said = f"{group}={typed(value)}"
    if override.is_delete():
        return None
    if override.is_add() or override.is_force_add():
        return f"{override.input_line}: {group} is a choice that is there already; give {said}"
    if not options_of(group):
        return f"{said}: has keys of its own; give {group}.KEY=VALUE {HELP}"
    if value is None:
        return f"{said}: {one_of(group, '')}, or left out"
    is_tree = group == "tree" and tree_of(str(value)) is not None
    known = value in options_of(group) or is_tree or str(value).startswith(FIELDS)
    return None if known else f"{said}: {one_of(group, str(value))}"


@dataclass
class _Keys:
    """The keys that there are, which overrides add to and take from, and the names of groups."""

    known: set[str]
    groups: set[str]

    @classmethod
    def of(cls, config: DictConfig, groups: set[str]) -> "_Keys":
        values: Any = OmegaConf.to_container(config, resolve=False)
        return cls(set(_paths({key: value for key, value in values.items() if key != "hydra"})), groups)

    def refusal(self, override: Override) -> str | None:
        """What is wrong with this override of a key; without a fault what it changes counts for the next ones."""
        key, value, line = override.key_or_group, override.value(), str(override.input_line)
        is_choice = key in self.groups and not isinstance(value, dict)
        if is_choice and not override.is_delete():
            return None
        if override.is_delete():
            if key not in self.known | self.groups:
                return self._unknown(line, key)
            if value is not None:
                return f"{line}: must be ~{key}, without a value"
            self.known -= {each for each in self.known if f"{each}.".startswith(f"{key}.")}
            return None
        if override.is_add() and is_group(key) and not isinstance(value, dict):
            return self._unknown(line, key)  # another command has it
        if override.is_add() and key in self.known and not isinstance(value, dict | list):
            return f"{line}: the key is there already; give {line.removeprefix('+')}"
        given = [key, *_paths(value, f"{key}.")] if isinstance(value, dict) else [key]
        if override.is_add() or override.is_force_add():
            parts = key.split(".")
            self.known |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)} | set(given)
            return None
        mappings = {each.rpartition(".")[0] for each in self.known}  # a value in place of null may have any keys
        lacking = [each for each in given if each not in self.known]
        wrong = next((each for each in lacking if each == key or each.rpartition(".")[0] in mappings), None)
        if wrong is None:
            self.known |= set(given)
            return None
        return self._unknown(f"{SHORT.get(key, key)}={_typed(line)}", wrong)

    def _unknown(self, said: str, key: str) -> str:
        name = SHORT.get(key, key)
        what = "no such key" if said.lstrip("~+").partition("=")[0] == name else f"no such key as {name}"
        return f"{said}: {what}{self._choice(key, _typed(said)) or self.nearest(key)} {HELP}"

    def _choice(self, key: str, value: str) -> str:
        """The choice that was meant by a key of this name below a group, whose option the value names."""
        above = {each.rpartition(".")[0] for each in self.known if each.rpartition(".")[2] == key}
        meant = sorted(each for each in above & self.groups if value in options_of(each))
        return f"; did you mean {meant[0]}={value}?" if meant else ""

    def nearest(self, key: str) -> str:
        """The key that was meant: one beside it, else one of the same name elsewhere, else one alike in all."""
        above, _, name = key.rpartition(".")
        known = [each for each in self.known | self.groups if not key.startswith(f"{each}.")]
        if key in SHORT:
            return did_you_mean(SHORT[key], [each for each in known if "." not in each])
        beside = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == above]
        if found := did_you_mean(name, beside, f"{above}." if above else ""):
            return found
        namesakes = [each for each in known if each.rpartition(".")[2] == name]
        return did_you_mean(key, namesakes, least=0.0) or did_you_mean(key, known, least=0.75)


def _typed(line: str) -> str:
    """An override's value, without the quotes that `cli.as_typed` gave it."""
    value = line.partition("=")[2]
    return value[1:-1] if re.fullmatch(r"'[^']*'", value) else value


def _paths(values: Mapping[Any, Any], above: str = "") -> Iterator[str]:
    """The keys of a mapping and of those below it, with dots."""
    for key, value in values.items():
        yield f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{key}.")
