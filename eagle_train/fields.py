"""Keys, defaults and comments of the settings, as their dataclasses give them, without importing these.

Each setting is written once: a field of a dataclass, with its default and a comment. The YAMLs have what differs. A
command answers `--help` and mistakes before torch is imported, and the dataclasses are in modules that import torch;
so their source is parsed. `<group>: fields` in a YAML's defaults list stands for what is read here; a kind of draft has
its own, `fields_<kind>`. DESIGN 3.10.
"""

import ast
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

FIELDS = "fields"  # the option of a group that stands for its dataclass
REQUIRED = "???"  # how OmegaConf writes a value that must be given

_PACKAGE = Path(__file__).parent
# Each group's dataclass, and where its module lies in the package.
_CLASSES = {
    "cluster": ("training/cost/estimate.py", "ClusterConfig"),
    "data": ("corpus/source.py", "DataConfig"),
    "engine": ("inference/options.py", "EngineConfig"),
    "optim": ("training/optimizer.py", "OptimConfig"),
    "parallel": ("training/backend.py", "ParallelConfig"),
    "quant": ("models/draft_quantisation.py", "Quant"),
    "target": ("models/loading.py", "TargetConfig"),
    "train": ("training/train_config.py", "TrainConfig"),
}
_KINDS = {  # of drafts
    "eagle": ("drafts/eagle.py", "EagleConfig"),
    "eagle3": ("drafts/eagle3.py", "Eagle3Config"),
    "medusa": ("drafts/medusa.py", "MedusaConfig"),
    "mtp": ("drafts/mtp.py", "MtpConfig"),
    "peagle": ("drafts/peagle.py", "PeagleConfig"),
}
# Where a command's default is not Python's: sizes of the draft follow from the target unless they are given, and data
# are asked for. And fields that are no settings.
_SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings")
_OTHER_DEFAULTS: dict[str, dict[str, str | None]] = {
    "data": {"path": REQUIRED},
    "draft": dict.fromkeys((*_SIZES, "rope_parameters", "rms_norm_eps")),
}
_EMPTY: dict[str, Any] = {"dict": {}, "list": []}  # what a default_factory makes
_NO_SETTINGS: dict[str, tuple[str, ...]] = {
    "draft": ("hidden_size", "vocabulary", "target_vocab_size"),
    # It has no attention and no norm.
    f"{FIELDS}_medusa": (*_SIZES, "rope_parameters", "rms_norm_eps", "first_token", "window", "sink"),
    f"{FIELDS}_peagle": ("norm_output",),  # it has no chains
}


@dataclass(frozen=True)
class Field:
    """One setting. `value` is the default, `text` the same as a user types it; `comment` stands behind it."""

    name: str
    value: Any
    text: str
    comment: str


def bases() -> list[tuple[str, str]]:
    """What dataclasses stand for: each group with the option of it."""
    kinds = (("draft", f"{FIELDS}_{kind}") for kind in _KINDS)
    return sorted([*((group, FIELDS) for group in _CLASSES), *kinds])


@cache
def fields_of(group: str, option: str = FIELDS) -> tuple[Field, ...]:
    """The settings of a group's dataclass (`option`: see `bases`), in its order."""
    path, name = _CLASSES[group] if option == FIELDS else _KINDS[option.removeprefix(f"{FIELDS}_")]
    others = _OTHER_DEFAULTS.get(group, {})
    left_out = (*_NO_SETTINGS.get(group, ()), *_NO_SETTINGS.get(option, ()))
    found = [each for each in _parse_fields(_PACKAGE / path, name) if each.name not in left_out]
    return tuple(
        replace(each, value=others[each.name], text=others[each.name] or "null") if each.name in others else each
        for each in found
    )


def defaults_of(group: str, option: str = FIELDS) -> dict[str, Any]:
    """The defaults by name of a group's dataclass; `???` for a field that must be given."""
    return {each.name: each.value for each in fields_of(group, option)}


def _parse_fields(path: Path, name: str) -> list[Field]:
    """The fields of a dataclass in a module's source, those of its bases, there or in what it imports, before its
    own."""
    source = path.read_text("utf-8")
    lines, tree = source.splitlines(), ast.parse(source)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    found = {each.name: each for base in classes[name].bases for each in _fields_of_base(base, path, tree)}
    for statement in classes[name].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and _is_field(statement):
            field, comment = statement.target.id, _comment(statement, lines)
            found[field] = Field(field, *_default(statement.value, source), comment)
    return list(found.values())


def _is_field(statement: ast.AnnAssign) -> bool:
    return not ast.unparse(statement.annotation).startswith("ClassVar")


def _fields_of_base(base: ast.expr, path: Path, tree: ast.Module) -> list[Field]:
    """The fields of a class's base that its own module defines, or imports from this package."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == ast.unparse(base):
            return _parse_fields(path, node.name)
        if isinstance(node, ast.ImportFrom) and ast.unparse(base) in [alias.name for alias in node.names]:
            module = _PACKAGE.parent.joinpath(*str(node.module).split(".")).with_suffix(".py")
            return _parse_fields(module, ast.unparse(base)) if module.is_relative_to(_PACKAGE) else []
    return []


def _default(node: ast.expr | None, source: str) -> tuple[Any, str]:
    """A default as a value and as a user types it. A mutable one is written field(default_factory=...)."""
    if node is None:
        return REQUIRED, REQUIRED
    if isinstance(node, ast.Call):
        factory = node.keywords[0].value
        value = ast.literal_eval(factory.body) if isinstance(factory, ast.Lambda) else _EMPTY[ast.unparse(factory)]
        return value, str(value)
    value = ast.literal_eval(node)
    if isinstance(value, bool | None):
        return value, {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return list(value), str(list(value))
    if isinstance(value, str):
        return value, value
    return value, str(ast.get_source_segment(source, node)).replace("_", "")


def _comment(statement: ast.AnnAssign, lines: list[str]) -> str:
    """The comment behind a field's default."""
    assert statement.end_lineno is not None  # a node that was parsed has its place
    return lines[statement.end_lineno - 1][statement.end_col_offset :].strip().removeprefix("#").strip()
