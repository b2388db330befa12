"""The rotary settings that a draft takes over from its target: those that its layers and serving engines both read.

The draft's frequencies are computed by transformers' rules (models/layers.py), an engine's by its own. With a key that
only one of the two reads, a draft would be served with other angles than it was trained with.
"""

import math
from collections.abc import Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_train.errors import check, shown
from eagle_train.models.shapes import heads_of

ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
    "short_mscale",
    "long_mscale",
)

_OF_LENGTH = ("longrope", "llama3", "yarn")  # for which engines read the length that a target was first trained with
_NEEDED = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)) | {
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_BY_FREQUENCY = ("short_factor", "long_factor")
_MSCALES = ("mscale", "mscale_all_dim")


def check_rotary(target_config: Any) -> dict[str, Any]:
    """The rotary settings of a target with this Hugging Face config. Raises UserError where it has none."""
    text = target_config.get_text_config()
    rope, kind = rope_parameters_of(text), text.model_type
    check(
        "rope_theta" in rope,
        f"target of type {kind}: its config has no rope_parameters; a draft needs a Llama-like target",
    )
    return rope


def rope_parameters_of(text: Any) -> dict[str, Any]:
    """A text config's rotary settings as a flat mapping of `ROPE_KEYS`, empty where it has none; where they differ by
    layer type, those of full attention. What only the target's family reads is put in common terms, or left out where
    it changes no angle: Ministral 3's scale of queries."""
    parameters = dict(getattr(text, "rope_parameters", None) or {})
    by_type = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if by_type:
        parameters = dict(by_type.get("full_attention") or next(iter(by_type.values())))
    return as_served(without_sections(parameters), heads_of(text).width)


def check_keys(parameters: Mapping[str, Any]) -> None:
    """Raise UserError for a rotary setting of a draft that is none of `ROPE_KEYS`."""
    strange = next((key for key in parameters if key not in ROPE_KEYS), None)
    check(strange is None, f"draft.rope_parameters.{strange}: must be one of {', '.join(ROPE_KEYS)}")


def check_rope(parameters: Mapping[str, Any], head_dim: int) -> None:
    """Raise UserError for rotary settings of a draft, with heads so wide, of which no frequencies can be computed."""
    kind, place = parameters.get("rope_type", "default"), "draft.rope_parameters"
    known, said = ("default", *ROPE_INIT_FUNCTIONS), kind if isinstance(kind, str) else shown(kind)
    check(kind in known, f"{place}.rope_type={said}: must be one of {', '.join(known)}")
    for name in ("rope_theta", *_NEEDED.get(kind, ())):
        check(parameters.get(name) is not None, f"{place}.{name}: must be given with rope_type={kind}")
    for name, value in parameters.items():
        wanted = wanted_of(name, value)
        check(wanted is None, f"{place}.{name}={shown(value)}: must be {wanted}")
    count = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    for name in _BY_FREQUENCY:
        given = parameters.get(name)
        fits = given is None or len(given) == count
        check(fits, f"{place}.{name}={shown(given)}: must be {count} numbers, one for each frequency of a head")


def wanted_of(name: str, value: Any) -> str | None:
    """What a rotary setting must be, in words that follow "must be", where this value is something else."""
    if name == "rope_type" or value is None:
        return None
    if name == "truncate":
        return None if isinstance(value, bool) else "true or false"
    if name in _BY_FREQUENCY:
        sound = isinstance(value, list | tuple) and all(map(is_positive, value))
        return None if sound else "a list of numbers above 0"
    if name in _MSCALES:
        return None if _is_number(value) else "a number"
    if name == "partial_rotary_factor":
        return None if is_positive(value) and value <= 1 else "above 0 and at most 1"
    return None if is_positive(value) else "a number above 0"


def is_positive(value: Any) -> bool:
    """Whether it is a number above 0, and finite."""
    return _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def check_lengths(parameters: Mapping[str, Any]) -> None:
    """Raise UserError for settings of a draft that depend on a length which they do not say."""
    kind, name = parameters.get("rope_type"), "original_max_position_embeddings"
    is_said = kind not in _OF_LENGTH or parameters.get(name) is not None
    check(is_said, f"draft.rope_parameters.{name}: must be given with rope_type={kind}")


def as_served(parameters: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Rotary settings in the terms in which engines compute the same frequencies from them, for heads so wide; other
    keys than `ROPE_KEYS` are dropped. Checked against vLLM 0.32's own, for each type."""
    changes: dict[str, Any] = {}
    kind = parameters.get("rope_type")
    if kind == "dynamic":
        # In its context a target's plain frequencies; vLLM takes those of the longest text, whatever a text's length.
        changes = {"rope_type": "default", "factor": None}
        if alpha := parameters.get("alpha"):  # HunYuan: a larger base, at any length
            width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            changes["rope_theta"] = parameters["rope_theta"] * alpha ** (width / (width - 2))
    elif kind == "longrope":
        changes = _scale_of_longrope(parameters)
    elif kind == "yarn":
        changes = _scale_of_yarn(parameters)
    elif kind == "proportional":  # engines have no factor here
        changes = {"factor": None}
    # JSON and dataclass round trips keep plain values only
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in {**parameters, **changes}.items()
        if key in ROPE_KEYS and value is not None
    }


def without_sections(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings without M-RoPE's sections, which say nothing at a text's positions, and without the old name of
    `rope_type`."""
    kept = (key for key in parameters if key not in ("type", "rope_type") and not key.startswith("mrope"))
    named, kind = {key: parameters[key] for key in kept}, parameters.get("rope_type") or parameters.get("type")
    return named if kind is None else named | {"rope_type": "default" if kind == "mrope" else kind}


def _scale_of_longrope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The factor on cos and sin under both of its names: transformers reads `attention_factor` or `factor`,
    Phi-3.5-MoE and engines the two others. Empty where it follows from the lengths."""
    scale, factor = parameters.get("short_mscale") or parameters.get("attention_factor"), parameters.get("factor")
    length = parameters.get("original_max_position_embeddings")
    if scale is None and factor is not None and length is not None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    if scale is None:
        return {}
    long = parameters.get("long_mscale") or scale
    return {"attention_factor": scale, "short_mscale": scale, "long_mscale": long}


def _scale_of_yarn(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The factor on cos and sin in the terms of all engines: SGLang does not read `attention_factor`, and takes a
    `mscale` of 0 for a number, where others take it for none."""
    scale, factor = parameters.get("attention_factor"), parameters.get("factor") or 1.0
    if scale is not None and factor > 1:
        growth = 0.1 * math.log(factor)
        return {"mscale": (scale * (1 + growth) - 1) / growth, "mscale_all_dim": 1.0}
    is_pair = all(parameters.get(name) for name in _MSCALES)
    return {} if is_pair else dict.fromkeys(_MSCALES)
