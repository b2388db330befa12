"""The tokens that end an answer: one function for whoever asks, training, engine and evaluations alike. DESIGN 3.1."""

from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig

from eagle_train.models.loading import TargetConfig


def stop_ids_of(generation_config: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """The eos_token_id, one or several, of the generation config, or of the model's config where that has none, and the
    tokenizer's own EOS. Any of the three may be None."""
    eos = getattr(generation_config, "eos_token_id", None)
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    return frozenset(token for each in (eos, getattr(tokenizer, "eos_token_id", None)) for token in _as_ids(each))


def _as_ids(eos: int | Iterable[int] | None) -> list[int]:
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def load_stop_ids(target: TargetConfig, hf_config: Any, tokenizer: Any) -> frozenset[int]:
    """`stop_ids_of` a checkpoint, read from its files: those of the model that is loaded from them."""
    try:
        generation_config = GenerationConfig.from_pretrained(target.path)
    except OSError:  # has none
        generation_config = None
    return stop_ids_of(generation_config, hf_config.get_text_config(), tokenizer)
