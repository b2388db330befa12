"""Whether the family of a config can be a target: its class, and what a small twin of it does. No weight is read.

By behaviour, not by name: a family that nobody here knows is accepted or refused by what it computes. DESIGN 3.4.
"""

import json
from typing import Any

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    GenerationMixin,
    PreTrainedModel,
)

from eagle_train.errors import check, foreign
from eagle_train.models.forward import PROBED, Reach, Reaches, hidden_states
from eagle_train.models.head import head_of, lm_head_of
from eagle_train.models.probe import TOKENS, UNREACHED, probe
from eagle_train.models.shapes import check_shape, context_of, layer_config, rope_limit, rope_types
from eagle_train.models.twin import longest_border, twin_of
from eagle_train.ops.attention import packed_attention
from eagle_train.ops.rule import Attend, Rule
from eagle_train.transformers_private import is_stateful

AUTO_CLASSES: dict[Any, Any] = {  # and the classes that each makes, by that of the config
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}
NO_CAUSAL = "is no causal language model; a target goes on with a text, as Llama does"
STATELESS = ("attention", "full_attention", "sliding_attention", "chunked_attention", "moe", "mlp")  # layers
ENDS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # of names of classes that go on with a text
known: dict[tuple[type, str], Reaches] = {}  # of the classes and configs that passed


def auto_class(config: Any, place: str) -> Any:
    """transformers' auto class that loads a checkpoint with this config. Raises UserError for one that no text goes on
    from; `place` begins the message."""
    named = _declared_class(config) or f"model_type {config.model_type}"
    check(
        not getattr(config, "is_encoder_decoder", False),
        f"{place}: {named} is an encoder-decoder; a target is a decoder alone, as Llama is",
    )
    own_code = getattr(config, "auto_map", None) or {}
    own = next((each for each in AUTO_CLASSES if each.__name__ in own_code), None)
    check(own is not None or _continues_text(config), f"{place}: {named} {NO_CAUSAL}")
    found = own or next((each for each, classes in AUTO_CLASSES.items() if type(config) in classes), None)
    check(found is not None, f"{place}: {named} {NO_CAUSAL}")
    return found


def _continues_text(config: Any) -> bool:
    """Whether the class that a config declares goes on with a text; one that declares none may.

    transformers loads any checkpoint as a causal language model if another of its kind is one: a reward model's or an
    encoder's weights too, with an LM head that nobody trained.
    """
    name = _declared_class(config)
    known_class = None if name is None else getattr(transformers, name, None)
    if known_class is None:
        return name is None or name.endswith(ENDS)
    return isinstance(known_class, type) and issubclass(known_class, GenerationMixin)


def _declared_class(config: Any) -> str | None:
    """The name of the class that a checkpoint's config says it is of."""
    names = getattr(config, "architectures", None) or []
    return next(map(str, [names] if isinstance(names, str) else names), None)


def _keeps_state(auto: Any, config: Any) -> bool:
    """Whether transformers says that models of a config keep states (of Mamba, linear attention, convolutions).

    Where the config names its layers one by one, these may all be attention; what others keep shows in a twin.
    """
    found = AUTO_CLASSES[auto].get(type(config), None)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ["state"]
    return is_stateful(found) and any(kind not in STATELESS for kind in kinds)


def skeleton(config: Any, trust_remote_code: bool, place: str) -> PreTrainedModel:
    """The model of a config without memory for its weights. Raises UserError where its family cannot build one."""
    auto = auto_class(config, place)
    check(
        not _keeps_state(auto, config),
        f"{place}: this family ({config.model_type}) keeps a state beside its attention's keys and values, which can "
        "neither be packed nor branched into a tree of drafts; it is not supported",
    )
    check(
        getattr(config.get_text_config(), "index_topk", None) is None,
        f"{place}: this family ({config.model_type}) attends to the keys that an indexer of its own chooses "
        "(index_topk), which our attention does not know; it is not supported",
    )
    check_shape(config, place)
    with foreign(f"{place}: no model can be built from its config{rope_types(config)}"), torch.device("meta"):
        return auto.from_config(config, trust_remote_code=trust_remote_code)


@torch.no_grad()
def check_family(model_class: type[PreTrainedModel], config: Any, place: str) -> Reaches:
    """Raise UserError unless attention from outside gives what models of this class and config compute themselves,
    behind every window, chunk and border of RoPE that the config names; `place` begins the message.

    Costs about a second, once for each config in a process. Returns what the masks of the layers hide: nothing where no
    twin can be built and the config names no border, for then a short text tells all (`Target.check_states`).
    """
    key = model_class, json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in known:
        family, text = config.model_type, config.get_text_config()
        with foreign(f"{place}: this family ({family}) cannot be run on text alone"):
            twin = twin_of(model_class, config)
        border = longest_border(text)
        check(
            twin is not None or border < TOKENS // 2,
            f"{place}: what attention does beyond {border} tokens in this family ({family}) cannot be checked, for no "
            "small twin of it can be built; it is not supported",
        )
        known[key] = {} if twin is None else _reaches_of_config(_reaches_of(twin, place), text)
    return known[key]


def _reaches_of_config(reaches: Reaches, text: Any) -> Reaches:
    """What layers see of a model with this config, by what those of its twin see."""

    def own(layer: int, reach: Reach) -> Reach:
        config = layer_config(text, layer)
        return Reach(
            None if reach.window is None else config.sliding_window,
            None if reach.chunk is None else config.attention_chunk_size,
        )

    return {layer: own(layer, reach) for layer, reach in reaches.items()}


def _reaches_of(twin: PreTrainedModel, place: str) -> Reaches:
    """What the masks of a twin's layers hide. Raises UserError for a twin that does not pass."""
    family, text = twin.config.model_type, twin.config.get_text_config()
    reaches: dict[int, Reach] = {}
    check(head_of(twin) is not None, f"{place}: this family ({family}) has no LM head; it is not supported")
    head, limit = lm_head_of(twin), rope_limit(text)
    tokens = torch.arange(min(TOKENS, context_of(text)[0]))[None] % text.vocab_size

    def logits_of(tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        return head(hidden_states(twin, tokens, positions, attend, reaches, limit))

    attention, borders = packed_attention([[tokens.shape[1]]]), {0}

    def noting(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        borders.update((rule.window or 0, rule.chunk or 0))
        return attention(layer, q, k, v, rule)

    _check_causal(twin, tokens, place)
    with foreign(f"{place}: {UNREACHED.format(family)}"):
        twin.set_attn_implementation(PROBED)
        logits_of(tokens, torch.arange(tokens.shape[1])[None], noting)
    check(
        max(borders) < tokens.shape[1],
        f"{place}: what attention does beyond {max(borders)} tokens in this family ({family}) cannot be checked, for "
        "its config names them in no way that is known; it is not supported",
    )
    probe(twin, logits_of, tokens, place)
    return reaches


def _check_causal(model: PreTrainedModel, tokens: torch.Tensor, place: str) -> None:
    """Raise UserError where a token's logits depend on those behind it."""
    family = model.config.model_type
    with foreign(f"{place}: this family ({family}) cannot be run on text alone"):
        model.set_attn_implementation("eager")
        other = tokens.clone()
        other[:, -1] = (other[:, -1] + 1) % model.config.get_text_config().vocab_size
        own, changed = (model(input_ids=each, use_cache=False).logits[:, :-1] for each in (tokens, other))
    check(
        torch.allclose(own, changed, rtol=1e-4, atol=1e-5),
        f"{place}: this family ({family}) reads what stands after a token too, as an encoder does; a target is a "
        "causal language model, as Llama is",
    )
