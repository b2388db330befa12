"""Keys, defaults and comments of the settings, as their dataclasses give them, without importing these.

Each setting is written once: a field of a dataclass, with its default and a comment. The YAMLs have what differs. A
command answers `--help` and mistakes before torch is imported, and the dataclasses are in modules that import torch;
so their source is parsed. `<group>: fields` in a YAML's defaults list stands for what is read here. DESIGN 3.10.
"""

import ast
from collections.abc import Iterator, Mapping
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
    "draft": ("models/draft_config.py", "DraftConfig"),
    "engine": ("inference/options.py", "EngineConfig"),
    "optim": ("training/optimizer.py", "OptimConfig"),
    "parallel": ("training/backend.py", "ParallelConfig"),
    "quant": ("models/draft_quantisation.py", "Quant"),
    "target": ("models/loading.py", "TargetConfig"),
    "train": ("training/train_config.py", "TrainConfig"),
}
# Where a command's default is not Python's: sizes of the draft follow from the target unless they are given, and data
# are asked for. And fields that are no settings.
_SIZES = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings")
_OTHER_DEFAULTS: dict[str, dict[str, str | None]] = {
    "data": {"path": REQUIRED},
    "draft": dict.fromkeys((*_SIZES, "rope_parameters", "rms_norm_eps")),
}
_EMPTY: dict[str, Any] = {"dict": {}, "list": []}  # what a default_factory makes
_NO_SETTINGS: dict[str, tuple[str, ...]] = {"draft": ("hidden_size", "vocabulary")}


@dataclass(frozen=True)
class Field:
    """One setting. `value` is the default, `text` the same as a user types it; `comment` stands behind it."""

    name: str
    value: Any
    text: str
    comment: str


@cache
def fields_of(group: str) -> tuple[Field, ...]:
    """The settings of a group, in the order of its dataclass."""
    path, name = _CLASSES[group]
    others, left_out = _OTHER_DEFAULTS.get(group, {}), _NO_SETTINGS.get(group, ())
    found = [each for each in _parse_fields(_PACKAGE / path, name) if each.name not in left_out]
    return tuple(
        replace(each, value=others[each.name], text=others[each.name] or "null") if each.name in others else each
        for each in found
    )


def groups() -> dict[str, dict[str, Any]]:
    """The defaults by name of each group that a dataclass describes; `???` for a field that must be given."""
    return {group: {each.name: each.value for each in fields_of(group)} for group in _CLASSES}


def _parse_fields(path: Path, name: str) -> list[Field]:
    """The fields of a dataclass in a module's source, those of its bases in the same module before its own."""
    source = path.read_text("utf-8")
    lines = source.splitlines()
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    found: dict[str, Field] = {}
    for node in _with_bases(classes[name], classes):
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                field, comment = statement.target.id, _comment(statement, lines)
                found[field] = Field(field, *_default(statement.value, source), comment)
    return list(found.values())


def _with_bases(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _with_bases(classes[base.id], classes)
    yield node


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
