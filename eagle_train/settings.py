"""Settings: where the YAMLs are, and a mapping as the dataclass that describes it. Knows nothing of Hydra or commands:
each dataclass lives with the code that reads it. DESIGN section 3.10.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from eagle_train.errors import UserError, check, did_you_mean, foreign, one_line, shown, within

T = TypeVar("T")

PACKAGE = Path(__file__).parent
# A wheel carries the YAMLs inside the package; in a clone they lie beside it.
CONF_DIR = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
BUNDLED = "data/tiny_target"  # likewise
# What OmegaConf says of a value of the wrong type, and what would be right.
MISTYPED = re.compile(r"Value '(.*?)' (?:is not a valid|of type '\w+' could not be converted to) (bool|Integer|Float)")
RIGHT = {"bool": "must be true or false", "Integer": "must be a whole number", "Float": "must be a number"}


def bundled(path: str) -> str:
    """A path of the bundled target from any working directory; any other path as it is."""
    inside = CONF_DIR.parent / path
    is_elsewhere = path.startswith(BUNDLED) and not Path(path).exists() and inside.exists()
    return str(inside) if is_elsewhere else path


def build(cls: type[T], values: Any, field: str) -> T:
    """`values` as the dataclass `cls`; unknown keys, wrong types and numbers that are not finite are refused with a
    UserError that names `field`. A dataclass names the fields that may be inf in a ClassVar `unbounded`."""
    check(isinstance(values, Mapping), f"{field}={values!r}: must be a mapping")
    try:
        with within(field):
            made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
            _check_finite(made, field)
            return cast(T, made)
    except OmegaConfBaseException as error:
        own = error.full_key or misfit(cls, values)
        key = ".".join(part for part in (field, own) if part)
        wants_list = re.search(r"is not a ListConfig|type hint 'typing\.List", str(error))
        said = no_list(key, OmegaConf.select(OmegaConf.create(values), own)) if wants_list else one_line(error)
        if found := MISTYPED.match(said):
            raise UserError(f"{key}={found[1]}: {RIGHT[found[2]]}") from error
        if isinstance(error, ConfigKeyError) and is_dataclass(error.object_type):  # OmegaConf names a class of ours
            said = "no such key" + did_you_mean(str(error.key), [each.name for each in fields(error.object_type)])
        raise UserError(f"{key}: {said}") from error


def _check_finite(made: Any, place: str) -> None:
    """Raise UserError for a number that is not finite, in a dataclass or in one that it holds: no check of a least
    value finds inf, and clocks, counts and plans fail at it later."""
    held = made if isinstance(made, Mapping) else {each.name: getattr(made, each.name) for each in fields(made)}
    for name, value in held.items():
        key = ".".join(part for part in (place, str(name)) if part)
        if isinstance(value, float):
            may_be = value == math.inf and name in getattr(made, "unbounded", ())
            check(math.isfinite(value) or may_be, f"{key}={value}: must be a finite number")
        elif is_dataclass(value) or (isinstance(value, Mapping) and any(map(is_dataclass, value.values()))):
            _check_finite(value, key)


def no_list(key: str, value: Any) -> str:
    """What to give where a list is wanted; of one that Hydra took for a text, why."""
    if isinstance(value, str) and value.startswith("["):
        return f"no list is read in {shown(value)}: texts in it with = or other marks stand in quotes, {key}=['a=b']"
    if OmegaConf.is_list(value):
        return f"must be a list of lists, as {key}=[[...], [...]]"
    return f"must be a list, as {key}=[...]"


def misfit(cls: type, values: Mapping[str, Any]) -> str:
    """The first key whose value the dataclass does not take; of a list within a list OmegaConf does not tell."""
    for key in values:
        try:
            OmegaConf.merge(OmegaConf.structured(cls), {key: values[key]})
        except OmegaConfBaseException:
            return key
    return ""


def instantiate(spec: Mapping[str, Any], field: str, **more: Any) -> Any:
    """What `_target_`, a dotted name, makes of the other keys and `more`: YAMLs are the only registry.

    Raises UserError, naming `field`, for a name that is nothing to call, for keys that it does not take, and for
    whatever else it raises, with the class of that error.
    """
    what = f"{field} {spec['_target_']}"
    return call(named(str(spec["_target_"]), what), what, keys_of(spec) | more)


def keys_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What `_target_` is called with, of a spec that `instantiate` takes."""
    values: Any = OmegaConf.to_container(spec, resolve=True) if OmegaConf.is_config(spec) else dict(spec)
    return {key: value for key, value in values.items() if key != "_target_"}


def call(made_by: Callable[..., Any], what: str, values: Mapping[str, Any]) -> Any:
    """`made_by(**values)`; whatever it raises is a UserError that begins with `what`, but for its own UserErrors."""
    try:
        return made_by(**values)
    except UserError:
        raise
    except Exception as error:  # whatever the code that is named raises
        began = error.__traceback__ is not None and error.__traceback__.tb_next is not None  # else keys do not fit
        kind = f"{type(error).__name__}: " if began else ""
        raise UserError(f"{what}: {kind}{one_line(error)}") from error


def named(target: str, what: str) -> Callable[..., Any]:
    """What a dotted name stands for, which can be called. Raises UserError that begins with `what`."""
    module, _, name = target.rpartition(".")
    check(bool(module), f"{what}: must be a dotted name, MODULE.NAME")
    with foreign(what):  # importing a module runs it
        found = import_module(module)
    check(callable(getattr(found, name, None)), f"{what}: module {module} has nothing to call of the name {name}")
    return getattr(found, name)
