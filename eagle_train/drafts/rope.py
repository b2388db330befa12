"""The rotary settings that a draft takes over from its target: those that its layers and serving engines both read.

The draft's frequencies are computed by transformers' rules (models/layers.py), an engine's by its own. With a key that
only one of the two reads, a draft would be served with other angles than it was trained with.
"""

from collections.abc import Mapping
from typing import Any

from eagle_train.errors import check
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
    parameters = without_sections(parameters)
    if parameters.get("rope_type") == "dynamic" and parameters.get("alpha"):  # HunYuan: a larger base, at any length
        width = int(heads_of(text).width * parameters.get("partial_rotary_factor", 1.0))
        base = parameters["rope_theta"] * parameters["alpha"] ** (width / (width - 2))
        parameters = parameters | {"rope_type": "default", "rope_theta": base, "factor": None}
    # JSON and dataclass round trips keep plain values only
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
    return with_scale({key: value for key, value in plain.items() if key in ROPE_KEYS and value is not None})


def without_sections(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings without M-RoPE's sections, which say nothing at a text's positions, and without the old name of
    `rope_type`."""
    named = {key: value for key, value in parameters.items() if key != "type" and not key.startswith("mrope")}
    kind = parameters.get("rope_type", parameters.get("type"))
    return named if kind is None else named | {"rope_type": "default" if kind == "mrope" else kind}


def with_scale(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings whose factor on cos and sin, where longrope has one of its own, stands under both of its names:
    transformers reads `attention_factor`, Phi-3.5-MoE and serving engines the two others."""
    scale = parameters.get("short_mscale") or parameters.get("attention_factor")
    if parameters.get("rope_type") != "longrope" or scale is None:
        return dict(parameters)
    long = parameters.get("long_mscale") or scale
    return {**parameters, "attention_factor": scale, "short_mscale": scale, "long_mscale": long}
