"""What a target's config alone says of its shape: its layers' heads, and how long a text may be."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_train.errors import check, foreign, shown


@dataclass(frozen=True)
class _Heads:
    """A layer's attention: query heads, key/value heads, and their width."""

    queries: int
    keys: int
    width: int


class KVShape(NamedTuple):
    """A layer's key/value heads on a rank, and the widths of a key and of a value."""

    heads: int
    key_width: int
    value_width: int


NEEDED = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
LAYERS = 10_000  # more than any model has
HEADS = ("num_key_value_heads", "head_dim")  # which a config may leave out
OF_ROPE = ("rope_theta", "factor", "original_max_position_embeddings")  # numbers above 0


def check_shape(config: Any, place: str) -> None:
    """Raise UserError where a config does not say what a target needs; `place` begins the message."""
    with foreign(f"{place}: its config (model_type {config.model_type}) does not say what a target needs"):
        text = config.get_text_config()
        _check_sizes({name: getattr(text, name) for name in NEEDED}, place)
        check(
            text.num_hidden_layers <= LAYERS,
            f"{place}: its config has num_hidden_layers={text.num_hidden_layers}; it must be {LAYERS} at most",
        )
        for layer in range(text.num_hidden_layers):
            own = layer_config(text, layer)
            given = {name: size for name in HEADS if (size := getattr(own, name, None)) is not None}
            _check_sizes({"num_attention_heads": own.num_attention_heads, **given}, place)
            heads = heads_of(text, layer)
            check(
                heads.queries % heads.keys == 0,
                f"{place}: its config has num_key_value_heads={heads.keys}; it must divide num_attention_heads, "
                f"{heads.queries}",
            )
            _check_sizes({"head_dim": heads.width}, place)
        act = getattr(text, "hidden_act", None)
        check(act is None or act in ACT2FN, f"{place}: its config has hidden_act={shown(act)}, which is not known")
        _check_rope(getattr(text, "rope_parameters", None) or {}, place)


def _check_sizes(sizes: Mapping[str, Any], place: str) -> None:
    for name, size in sizes.items():
        check(isinstance(size, int) and size > 0, f"{place}: its config has {name}={size}; it must be 1 or more")


def rope_types(config: Any) -> str:
    """What to tell of a model that cannot be built, where its RoPE is of no type that any family may have."""
    rope, known = getattr(config.get_text_config(), "rope_parameters", None) or {}, ("default", *ROPE_INIT_FUNCTIONS)
    by_type = [values for values in rope.values() if isinstance(values, Mapping)]
    own = next((kind for each in by_type or [rope] if (kind := each.get("rope_type", "default")) not in known), None)
    return "" if own is None else f"; rope_parameters.rope_type={shown(own)} may be one of {', '.join(known)}"


def _check_rope(rope: Mapping[str, Any], place: str) -> None:
    """Raise UserError for rotary positions that cannot be computed, of all layers or by layer type."""
    own = f"{place}: its config has rope_parameters"
    by_type = [values for values in rope.values() if isinstance(values, Mapping)]
    for each in by_type or [rope]:
        for name in OF_ROPE:
            value = each.get(name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            check(value is None or is_number, f"{own}.{name}={shown(value)}; it must be a number above 0")


def widest(size: int | list[int] | None) -> int | None:
    """The largest of what a config may say for each layer (Gemma 3n)."""
    return max(size) if isinstance(size, list | tuple) else size


def layer_config(text: Any, layer: int) -> Any:
    """The config of one layer: the text model's own, but where layers differ in their widths (Gemma 4)."""
    return text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text


def heads_of(text: Any, layer: int = 0) -> _Heads:
    """A layer's heads."""
    own = layer_config(text, layer)
    queries = own.num_attention_heads
    keys = getattr(own, "num_key_value_heads", None) or queries
    return _Heads(queries, keys, getattr(own, "head_dim", None) or own.hidden_size // queries)


def rope_limit(config: Any) -> int | None:
    """From which position on one text of a call changes the rotary frequencies of all texts in it; None: nowhere.

    transformers chooses those of longrope and dynamic by the largest position of the call.
    """
    rope, ends = getattr(config, "rope_parameters", None) or {}, []
    for each in (rope, *(values for values in rope.values() if isinstance(values, dict))):  # some by layer type
        if each.get("rope_type") == "longrope":
            ends.append(each["original_max_position_embeddings"])
        elif each.get("rope_type") == "dynamic":
            ends.append(config.max_position_embeddings)
    return min(ends, default=None)


def context_of(config: Any) -> tuple[int, str]:
    """How long a text may be of a target so configured; and that in words, with its reason where it is RoPE."""
    limit = rope_limit(config)
    if limit is None:
        return config.max_position_embeddings, str(config.max_position_embeddings)
    return limit, f"{limit} (beyond, one text's RoPE would change the others')"
