"""Drafters, which propose tokens: one file each, with the interface `drafter.Drafter`. DESIGN section 3.5."""

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle_train.drafts import Draft
from eagle_train.errors import UserError, check, foreign, shown
from eagle_train.inference.drafters.drafter import Drafter
from eagle_train.models.target import Target
from eagle_train.settings import instantiate, named

EAGLE = "eagle_train.inference.drafters.trained.make_eagle"
"""The `_target_` of conf/drafter/eagle.yaml, which alone needs a draft."""


def make_drafter(spec: Mapping[str, Any], target: Target, draft: Draft | None) -> Drafter | None:
    """The drafter that a YAML of conf/drafter describes: `_target_` called with target, draft and its other keys.

    `spec`: see `drafter_spec`. Returns None for plain decoding. Raises UserError if the result is no drafter.
    """
    spec = drafter_spec(spec)
    drafter = instantiate(spec, "drafter", target=target, draft=draft)
    check(drafter is None or isinstance(drafter, Drafter), f"drafter {spec['_target_']}: makes no Drafter")
    return drafter


def drafter_spec(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with `_target_`, a class or a function, and the keys that it is called with.

    `spec` may be {file: FILE.yaml}, and other keys, which take the place of the file's; a module beside that file is
    importable. Imports what is named, and loads nothing. Raises UserError, also where it does not take `target` and
    `draft`.
    """
    if "file" in spec and "_target_" not in spec:
        file = spec["file"]
        check(isinstance(file, str | Path), f"drafter.file={shown(file)}: must be FILE.yaml")
        spec = _of_file(Path(file), {key: value for key, value in spec.items() if key != "file"})
    check(isinstance(spec, Mapping) and "_target_" in spec, "drafter: must have `_target_`, a dotted name to call")
    _check_takes(spec)
    return spec


def is_eagle(spec: Mapping[str, Any]) -> bool:
    """Whether `spec`, of `drafter_spec`, is EAGLE's, whose draft is an artifact."""
    return spec["_target_"] == EAGLE


def drafter_name(spec: Mapping[str, Any]) -> str:
    """A name for reports of what `spec`, of `drafter_spec`, describes: that of its class or function, without make_."""
    return str(spec["_target_"]).rpartition(".")[2].removeprefix("make_")


def _of_file(path: Path, own: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a YAML describes, with `own` keys in place of its."""
    check(path.is_file(), f"drafter={path}: no such file")
    folder = str(path.parent.resolve())
    sys.path += [folder] if folder not in sys.path else []  # a module beside the YAML is importable
    with foreign(f"drafter={path}"):
        loaded: Any = OmegaConf.load(path)
    check(OmegaConf.is_dict(loaded), f"drafter={path}: must be a mapping, with `_target_`, a dotted name to call")
    described: Any = OmegaConf.merge(loaded, own)
    missing = [f"drafter.{key}" for key in described if OmegaConf.is_missing(described, key)]
    check(not missing, f"{' and '.join(missing)} is needed in {path}: write a value for ???")
    return described


def _check_takes(spec: Mapping[str, Any]) -> None:
    """Raise UserError unless what the dotted name stands for takes `target`, `draft` and the other keys by name."""
    target = str(spec["_target_"])
    what = f"drafter {target}"
    made_by = named(target, what)
    with foreign(what):  # some of Python's own have no signature
        signature = inspect.signature(made_by)
    taken = signature.parameters.values()
    names = [each.name for each in taken if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind == each.VAR_KEYWORD for each in taken)
    check(
        takes_any or {"target", "draft"} <= set(names),
        f"{what}: is called with target=, draft= and the drafter's other keys, so it must take them by name; it takes "
        f"{', '.join(names) or 'none'}",
    )
    given = {"target": None, "draft": None} | {str(key): None for key in spec if key != "_target_"}
    try:
        signature.bind_partial(**given)  # tells a misspelt key before the one that is missing for it
        signature.bind(**given)
    except TypeError as error:
        raise UserError(f"{what}: {target.rpartition('.')[2]}() {error}") from error
