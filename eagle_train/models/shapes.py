"""What a target's config alone says of its shape: its layers' heads, and how long a text may be."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from eagle_train.config import check, foreign


@dataclass(frozen=True)
class Heads:
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


def check_shape(config: Any, place: str) -> None:
    """Raise UserError where a config does not say what a target needs; `place` begins the message."""
    with foreign(f"{place}: its config (model_type {config.model_type}) does not say what a target needs"):
        text = config.get_text_config()
        sizes = {name: getattr(text, name) for name in NEEDED}
        for layer in range(sizes["num_hidden_layers"]):
            heads = heads_of(text, layer)
            sizes |= {"num_attention_heads": heads.queries, "num_key_value_heads": heads.keys, "head_dim": heads.width}
        for name, size in sizes.items():
            check(isinstance(size, int) and size > 0, f"{place}: its config has {name}={size}; it must be 1 or more")


def layer_config(text: Any, layer: int) -> Any:
    """The config of one layer: the text model's own, but where layers differ in their widths (Gemma 4)."""
    return text.per_layer_config[layer] if getattr(text, "is_heterogeneous", False) else text


def heads_of(text: Any, layer: int = 0) -> Heads:
    """A layer's heads."""
    own = layer_config(text, layer)
    queries = own.num_attention_heads
    keys = getattr(own, "num_key_value_heads", None) or queries
    return Heads(queries, keys, getattr(own, "head_dim", None) or own.hidden_size // queries)


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
