"""The rotary settings that a draft takes over from its target."""

from collections.abc import Mapping
from typing import Any


def rope_parameters_of(text: Any) -> dict[str, Any]:
    """A text config's rotary settings as a flat mapping, empty where it has none; where they differ by layer type,
    those of full attention. M-RoPE's sections are left out: at a text's positions they say nothing."""
    parameters = dict(getattr(text, "rope_parameters", None) or {})
    by_type = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if by_type:
        parameters = dict(by_type.get("full_attention") or next(iter(by_type.values())))
    # JSON and dataclass round trips keep plain values only
    return {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in parameters.items()
        if not key.startswith("mrope")
    }
