"""Drafters, which propose tokens: one file each, with the interface `drafter.Drafter`. DESIGN section 3.5."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle_train.errors import check
from eagle_train.inference.drafters.drafter import Drafter
from eagle_train.models.draft import Draft
from eagle_train.models.target import Target
from eagle_train.settings import instantiate


def make_drafter(spec: Mapping[str, Any], target: Target, draft: Draft | None) -> Drafter | None:
    """The drafter that a YAML of conf/drafter describes: `_target_` called with target, draft and its other keys.

    `spec` may be {file: FILE.yaml}; a module beside that file is importable. Returns None for plain decoding. Raises
    UserError if the result is no drafter.
    """
    spec = drafter_spec(spec)
    drafter = instantiate(spec, "drafter", target=target, draft=draft)
    check(drafter is None or isinstance(drafter, Drafter), f"drafter {spec['_target_']}: makes no Drafter")
    return drafter


def drafter_spec(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping with `_target_`, read from the file where one is named. Raises UserError; loads nothing."""
    if set(spec) == {"file"}:
        path = Path(spec["file"])
        check(path.is_file(), f"drafter={path}: no such file")
        folder = str(path.parent.resolve())
        sys.path += [folder] if folder not in sys.path else []  # a module beside the YAML is importable
        described: Any = OmegaConf.load(path)
        missing = [f"drafter.{key}" for key in described if OmegaConf.is_missing(described, key)]
        check(not missing, f"{' and '.join(missing)} is needed in {path}: write a value for ???")
        spec = described
    check(isinstance(spec, Mapping) and "_target_" in spec, "drafter: must have `_target_`, a dotted name to call")
    return spec
