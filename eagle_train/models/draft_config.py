"""The draft's shape and conventions: what is saved with its weights. DESIGN section 3.3."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_train.errors import check
from eagle_train.models.shapes import heads_of
from eagle_train.settings import build

NOPE_EVERY = 4  # iRoPE as in Llama 4: every fourth layer has no rotary positions


@dataclass
class DraftConfig:
    """The draft's shape and conventions; saved with its weights. Sizes default to the target's, see `from_target`.

    `norms`: eagle1 has no norm before layer 0 and none at the end, which is what vLLM and SGLang load; full has both.
    `first_token`: self_fusion pairs the first token with its own hidden state; with skip it has no slot, as in EAGLE-1,
    vLLM and SGLang: the draft begins at (t_1, h_0), and what lies at position 0 is never seen. `fc_bias`: `fc` has a
    bias, as EAGLE-1's first checkpoints have; `qkv_bias`, `o_bias` and `mlp_bias`: so have queries, keys and values (as
    Qwen2's layers), the attention's output, and the three matrices of a dense feed-forward. `embedding_scale`
    multiplies the token embeddings, which are often far smaller than the hidden states beside them, before `fc`; in an
    artifact it is folded into `fc`. `irope`: layers attend within chunks of `attention_chunk` positions, every fourth
    (and the last) sees everything and has no rotary positions. `vocab_size`: how many of the target's tokens the draft
    can propose, `vocabulary` which, ascending; None is all. It learns the distribution among them, and its LM head is
    so much smaller.
    """

    hidden_size: int
    intermediate_size: int  # null, here and below: the target's
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    rms_norm_eps: float = 1e-5
    num_layers: int = 3
    norms: str = "eagle1"  # eagle1 | full: no norm before layer 0 and at the end, or both
    ffn: str = "dense"  # dense | moe
    num_experts: int = 16  # of ffn=moe
    first_token: str = "self_fusion"  # self_fusion | skip: its own hidden state, or no slot, as serving engines have it
    fc_bias: bool = False  # a bias on what fuses embedding and hidden state, as EAGLE-1's first checkpoints have
    qkv_bias: bool = False  # on queries, keys and values, as Qwen2's layers have
    o_bias: bool = False  # on the attention's output
    mlp_bias: bool = False  # on the three matrices of a dense feed-forward
    embedding_scale: float = 1.0  # of embeddings, a power of two; null: what makes them as large as hidden states
    irope: bool = False  # chunks of attention_chunk positions; every fourth layer and the last: all, without RoPE
    attention_chunk: int = 8192
    vocab_size: int | None = None  # the most frequent tokens of the data, which alone the draft can propose; null: all
    vocabulary: list[int] | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "num_layers")
        for name in (*sizes, "num_experts", "attention_chunk"):
            check(getattr(self, name) >= 1, f"draft.{name}={getattr(self, name)}: must be at least 1")
        size, tokens = self.vocab_size, self.vocabulary
        check(size is None or size >= 1, f"draft.vocab_size={size}: must be null or at least 1")
        whole = tokens is None or (len(tokens) == size and tokens == sorted(set(tokens)))
        check(whole, f"draft.vocabulary: must be {size} different token ids in ascending order")
        is_power = self.embedding_scale > 0 and math.frexp(self.embedding_scale)[0] == 0.5
        check(
            is_power, f"draft.embedding_scale={self.embedding_scale}: must be a power of two, so that folding is exact"
        )
        choices = {"norms": ("eagle1", "full"), "ffn": ("dense", "moe"), "first_token": ("self_fusion", "skip")}
        for name, allowed in choices.items():
            check(getattr(self, name) in allowed, f"draft.{name}={getattr(self, name)}: must be {' or '.join(allowed)}")
        dense = not self.mlp_bias or self.ffn == "dense"
        check(dense, f"draft.mlp_bias=true: needs draft.ffn=dense, and it is {self.ffn}")
        even = self.head_dim % 2 == 0
        check(even, f"draft.head_dim={self.head_dim}: must be even, for rotary positions")
        heads = f"draft.num_heads={self.num_heads}, draft.num_kv_heads={self.num_kv_heads}"
        check(self.num_heads % self.num_kv_heads == 0, f"{heads}: the second must divide the first")

    @classmethod
    def from_target(cls, target_config: Any, **overrides: Any) -> "DraftConfig":
        """The draft for a target with this Hugging Face config; an override that is None is left to the target."""
        text = target_config.get_text_config()
        kind = f"target of type {text.model_type}: its config has no"
        rope = _rope_parameters_of(text)
        check("rope_theta" in rope, f"{kind} rope_parameters; a draft needs a Llama-like target")
        inner = overrides.get("intermediate_size") or widest(getattr(text, "intermediate_size", None))
        check(inner is not None, f"{kind} intermediate_size; give draft.intermediate_size")
        width = overrides.get("hidden_size") or text.hidden_size
        check(width == text.hidden_size, f"draft.hidden_size={width}: must be the target's, {text.hidden_size}")
        size = overrides.get("vocab_size") or 0
        check(size <= text.vocab_size, f"draft.vocab_size={size}: must be at most the target's, {text.vocab_size}")
        known = all(0 <= token < text.vocab_size for token in overrides.get("vocabulary") or [])
        check(known, f"draft.vocabulary: must be token ids of the target, below {text.vocab_size}")
        heads = heads_of(text)
        sizes = {
            "hidden_size": text.hidden_size,
            "intermediate_size": inner,
            "num_heads": heads.queries,
            "num_kv_heads": heads.keys,
            "head_dim": heads.width,
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": rope,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-5,
        }
        return build(cls, sizes | {key: value for key, value in overrides.items() if value is not None}, "draft")

    @property
    def first_slot(self) -> int:
        """Where the draft begins in a document."""
        return 1 if self.first_token == "skip" else 0

    def rope_of_layer(self, layer: int) -> tuple[bool, int | None]:
        """Whether the layer has rotary positions, and the chunk it attends within."""
        if not self.irope:
            return True, None
        if (layer + 1) % NOPE_EVERY == 0 or layer == self.num_layers - 1:
            return False, None
        return True, self.attention_chunk


def widest(size: int | list[int] | None) -> int | None:
    """The largest of what a config may say for each layer (Gemma 3n)."""
    return max(size) if isinstance(size, list | tuple) else size


def _rope_parameters_of(text: Any) -> dict[str, Any]:
    """The target's rotary settings as a flat mapping, empty where it has none; where they differ by layer type, those
    of full attention. M-RoPE's sections are left out: at a text's positions they say nothing."""
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
