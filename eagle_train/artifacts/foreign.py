"""Reads drafts that others trained: EAGLE-1, EAGLE-3 and P-EAGLE as EAGLE's repository, vLLM, SGLang, speculators do.

These share tensor names (`fc`, then Llama layers) and differ in what else their files hold. Such a file does not say
which target it is for, so the target is given. Knows nothing of our own artifacts.
"""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_train.artifacts.foreign_eagle3 import (
    OF_EAGLE3,
    eagle3_config,
    eagle3_tensors,
    fuses_none,
    positions_of,
    trains_embedding,
)
from eagle_train.artifacts.foreign_formats import NotRead, other_format
from eagle_train.artifacts.foreign_medusa import has_medusa_heads, load_medusa, medusa_tensors
from eagle_train.artifacts.tensors import TensorError, load_tensors, same_weight
from eagle_train.drafts import Draft, Eagle3Draft, EagleConfig, EagleDraft
from eagle_train.drafts.layouts import TOKEN_MAP, WEIGHTS
from eagle_train.drafts.rope import ROPE_KEYS, is_positive, wanted_of, without_sections
from eagle_train.errors import UserError, check, foreign, one_line, shown
from eagle_train.models.directory import read_mapping
from eagle_train.models.target import Target
from eagle_train.ops.tensor_files import tensors_of

_PICKLES = "pytorch_model*.bin"  # of EAGLE's repository, from before safetensors
_PREFIX = re.compile(r"^(module\.)?(model\.)?")  # that DDP and whole models put before tensor names
_NUMBERED = re.compile(r"^midlayer\.(?=\d)")  # TensorRT-LLM's names of several layers
_INDEX = "model.safetensors.index.json"
_EAGLE3 = ("hidden_norm", "d2t", "t2d")
_NESTED = ("model", "text_config", "transformer_layer_config")  # keys of vLLM's, multimodal and speculators' configs
_PARTIAL_VOCAB = ("truncated_vocab_size", "draft_vocab_size")
_OUTER = ("quantization_config", *_PARTIAL_VOCAB)  # keys of a nested config's outer level that matter
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_ORIGINAL = "original_max_position_embeddings"  # which some configs have beside the rotary settings, as Phi's
_COUNTS = (*_NEEDED, "num_key_value_heads", "head_dim", "num_hidden_layers", "max_position_embeddings", _ORIGINAL)
_NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
_ROPE = ("rope_scaling", "rope_parameters")
_DEFAULTED = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
_LLAMA4_INNER = "intermediate_size_mlp"  # of Llama 4's dense feed-forward; `intermediate_size` is that of an expert
_OF_ROPE = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)) | {
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Names of speculators and of EAGLE-3, and the common ones.
_RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0.", "midlayer.": "layers.0."}
_BIASES = {
    "qkv_bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "o_bias": ("self_attn.o_proj.bias",),
    "mlp_bias": tuple(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")),
}
_SHARED = {"embed_tokens.weight": "embedding", "lm_head.weight": "LM head"}  # of the target, which some files repeat


class OtherTarget(UserError):
    """A draft whose file repeats an embedding or an LM head that is not the target's."""


def load_foreign(directory: Path, target: Target, field: str = "checkpoint") -> Draft:
    """The draft in fp32. `field` names the directory in errors. Raises UserError for anything but EAGLE-1, EAGLE-3,
    P-EAGLE and Medusa drafts for this target: NotRead where we run no such draft, TensorError for a damaged file,
    OtherTarget."""
    place = f"{field}={directory}"
    if has_medusa_heads(directory):
        return load_medusa(directory, target, place)
    values = _read_config(directory, place)
    tensors = {common_name(name): tensor for name, tensor in _read_files(directory, place).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if "rotary_emb" not in name}  # computed from the config
    is_quantised = "quantization_config" in values or any(_is_in_few_bits(*each) for each in tensors.items())
    check(not is_quantised, f"{place}: is quantised; give the unquantised draft", NotRead)
    what = "fuses no layers (eagle_config.use_aux_hidden_state is false)" if fuses_none(values) else "is no EAGLE draft"
    lost = not fuses_none(values) and _is_eagle(values, tensors)
    check("fc.weight" in tensors or not lost, f"{place}: has no fc.weight, which every EAGLE draft has", TensorError)
    check("fc.weight" in tensors, f"{place}: has no fc.weight, so it {what}", NotRead)
    tensors = _without_zero_biases(tensors)
    if any(mark in name for name in tensors for mark in _EAGLE3):
        return _eagle3(place, values, tensors, target)
    for key in _PARTIAL_VOCAB:
        size, given = values["vocab_size"], values.get(key)
        whole = given in (None, size)
        check(whole, f"{place}: {key} is {given} in config.json; give a draft with all {size} tokens", NotRead)
    normed = "embedding_layernorm.weight" in tensors
    check(not normed, f"{place}: has a norm after the embedding (layernorms), which our drafts do not have", NotRead)
    norms = {name for name in ("norm.weight", "layers.0.input_layernorm.weight") if name in tensors}
    check(
        len(norms) != 1,
        f"{place}: has {' '.join(norms)}, but not the other of the first layer's input norm and the "
        "final norm; give a draft with both or none",
    )
    vocabulary = _token_map(directory, place)
    with _config_of(place):
        llama = _llama_of(values)
        _check_target(llama, target)
    for name, what in _SHARED.items():
        is_trained = what == "embedding" and trains_embedding(values)
        refuse_other(name, what, tensors.pop(name, None), target, place, is_trained)
    with _config_of(place):
        draft = EagleDraft(_shape_of(values, llama, tensors, target, vocabulary))
    load_tensors(draft, tensors, place)
    return draft


def _eagle3(place: str, values: dict[str, Any], tensors: dict[str, torch.Tensor], target: Target) -> Eagle3Draft:
    """An EAGLE-3 or P-EAGLE draft, from the part of its config.json that describes it and its tensors by their common
    names."""
    with _config_of(place):
        llama = _llama_of(values)
        _check_target(llama, target)
    embedding = tensors.pop("embed_tokens.weight", None)
    refuse_other("embed_tokens.weight", "embedding", embedding, target, place, trains_embedding(values))
    with _config_of(place):
        draft = eagle3_config(values, llama, tensors, target).module()
    load_tensors(draft, eagle3_tensors(tensors, draft.config, target, place), place)
    return draft


def foreign_tensors(directory: Path, field: str) -> dict[str, torch.Tensor]:
    """All tensors of a draft that others trained, by its file's own names, as `load_foreign` reads them."""
    place = f"{field}={directory}"
    return medusa_tensors(directory, place) if has_medusa_heads(directory) else _read_files(directory, place)


def stated_context(directory: Path, field: str) -> int | None:
    """The longest context of a draft that others trained, by its config.json: engines cut requests to it. None where
    nothing says it."""
    if has_medusa_heads(directory):
        return None
    return _read_config(directory, f"{field}={directory}").get("max_position_embeddings")


@contextmanager
def _config_of(place: str) -> Iterator[None]:
    """A mistake that is found meanwhile is one of config.json."""
    try:
        yield
    except NotRead as error:
        raise NotRead(f"{place}: config.json: {error}") from error
    except UserError as error:
        raise UserError(f"{place}: config.json: {error}") from error


def _is_eagle(values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether it says so, or has a tensor that EAGLE-3's drafts alone have."""
    classes = values.get("architectures")
    names = [*(classes if isinstance(classes, list) else []), values.get("speculators_model_type")]
    said = any("eagle" in str(name).lower() for name in names)
    return said or any(mark in name for name in tensors for mark in _EAGLE3)


def _check_target(llama: LlamaConfig, target: Target) -> None:
    """Raise NotRead for a draft of other sizes than the target's."""
    for name, own in (("hidden_size", target.identity.hidden_size), ("vocab_size", target.identity.vocab_size)):
        given = getattr(llama, name)
        check(given == own, f"{name} is {given}, and {own} in target {target.name}", NotRead)


def common_name(name: str) -> str:
    """A tensor's name in the common layout, without prefixes."""
    name = _NUMBERED.sub("layers.", _PREFIX.sub("", name))
    theirs = next((begin for begin in _RENAMED if name.startswith(begin)), None)
    return name if theirs is None else _RENAMED[theirs] + name.removeprefix(theirs)


def _read_config(directory: Path, place: str) -> dict[str, Any]:
    values = read_mapping(directory / "config.json", place)
    other = other_format(values)
    check(other is None, f"{place}: is {other}; EAGLE, EAGLE-3, P-EAGLE and Medusa are read", NotRead)
    return _draft_part(values, place)


def _draft_part(values: dict[str, Any], place: str) -> dict[str, Any]:
    """The part of a config.json that describes the draft's layers: all of it, or its part under one of `_NESTED`.

    Null values are dropped. Raises UserError for a missing number that has no common default.
    """
    inner = next((key for key in _NESTED if isinstance(values.get(key), dict)), None)
    if inner is not None and any(values.get(key) is None for key in _NEEDED):
        values = {key: value for key, value in values.items() if key in (*_OUTER, *OF_EAGLE3)} | values[inner]
    values = {key: value for key, value in values.items() if value is not None}
    missing = [key for key in _NEEDED if key not in values]
    check(not missing, f"{place}: config.json has no {', '.join(missing)}")
    act = values.get("hidden_act", "silu")
    check(act in ("silu", "swish"), f"{place}: hidden_act is {act!r} in config.json, and must be silu", NotRead)
    return values


def _without_zero_biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without biases that are zero in every layer: SGLang's layout needs them in the file."""
    kinds = {name: re.sub(r"\d+", "", name) for name in tensors if name.endswith(".bias")}
    used = {kind for name, kind in kinds.items() if tensors[name].any()}
    for names in _BIASES.values():
        if any(f"layers..{name}" in used for name in names):  # all biases of a kind, or none
            used |= {f"layers..{name}" for name in names}
    return {name: tensor for name, tensor in tensors.items() if name not in kinds or kinds[name] in used}


def _is_in_few_bits(name: str, tensor: torch.Tensor) -> bool:
    """Whether it is of a matrix as quantisers write it; some say so in a file of their own, and not in config.json."""
    last = name.rpartition(".")[2]
    return last.startswith("weight_") or (last == "weight" and tensor.dtype.itemsize == 1)


def _read_files(directory: Path, place: str) -> dict[str, torch.Tensor]:
    """All tensors of the directory: of its safetensors, one file or several, else of its pickles."""
    index, others = directory / _INDEX, sorted(directory.glob("*.safetensors"))
    pickles = sorted(directory.glob(_PICKLES))
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        elif (directory / WEIGHTS).is_file() or not others:
            names = [WEIGHTS]
        else:  # of other names, which engines read too
            names = [each.name for each in others]
        if (directory / names[0]).is_file() or not pickles:
            parts = [tensors_of(directory / name) for name in names]
        else:
            parts = [torch.load(path, map_location="cpu", weights_only=True) for path in pickles]
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{place}: its weights cannot be read: {one_line(error)}") from error
    return {name: tensor for part in parts for name, tensor in part.items()}


def _token_map(directory: Path, place: str) -> list[int] | None:
    """The tokens that SGLang is told to propose, where such a file lies beside the draft; None: all."""
    path = directory / TOKEN_MAP
    if not path.is_file():
        return None
    try:
        tokens = torch.as_tensor(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged pickle may raise anything
        raise UserError(f"{place}: {TOKEN_MAP} cannot be read: {one_line(error)}") from error
    is_list = tokens.ndim == 1 and len(tokens) > 0 and not tokens.is_floating_point()
    check(is_list, f"{place}: {TOKEN_MAP} has {list(tokens.shape)} numbers; it must be a list of tokens")
    return tokens.long().unique().tolist()


def refuse_other(
    name: str, what: str, found: torch.Tensor | None, target: Target, place: str, is_trained: bool = False
) -> None:
    """Raise OtherTarget for a file whose embedding or LM head differs from the target's: it is for another target, or
    was trained. `is_trained`: the file says so, and then it is NotRead."""
    if found is None:
        return
    same = same_weight(found, (target.embedding if what == "embedding" else target.lm_head.weight).cpu())
    own_one = f"has an {what} of its own" + (" (trained)" if is_trained else "") + ", which our drafts do not have"
    other = f"its {name} is not the {what} of {target.name}: it is for another target, or {own_one}"
    check(same, f"{place}: {own_one if is_trained else other}", NotRead if is_trained else OtherTarget)


def _shape_of(
    values: dict[str, Any],
    llama: LlamaConfig,
    tensors: dict[str, torch.Tensor],
    target: Target,
    vocabulary: list[int] | None,
) -> EagleConfig:
    """The draft's config: from a Llama-like config.json, and norms and biases from the tensors."""
    llama.max_position_embeddings = positions_of(llama, values, target)
    layers = _layers_of(tensors)
    biases = {
        flag: bool(layers) and all(f"layers.{layer}.{name}" in tensors for layer in layers for name in names)
        for flag, names in _BIASES.items()
    }
    return EagleConfig.from_target(
        llama,
        num_layers=llama.num_hidden_layers if not layers else max(layers) + 1,
        norms="full" if "norm.weight" in tensors else "eagle1",
        first_token="skip",
        fc_bias="fc.bias" in tensors,
        vocab_size=None if vocabulary is None else len(vocabulary),
        vocabulary=vocabulary,
        **biases,
    )


def _llama_of(values: dict[str, Any]) -> LlamaConfig:
    """The part of a config.json that determines what a Llama layer computes; what it leaves out is as its `model_type`
    says. Raises UserError for invalid values."""
    for key in _COUNTS:
        value = values.get(key, 1)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        check(is_count, f"{key} is {shown(value)}, and must be a whole number of 1 or more")
    for key in _NUMBERS:
        check(is_positive(values.get(key, 1)), f"{key} is {shown(values.get(key))}, and must be a number above 0")
    known = {key: values[key] for key in (*_COUNTS, *_NUMBERS) if key in values}
    for key in _ROPE:
        if key in values:
            known[key] = _sound_rope(key, values[key])
    what = " and ".join(f"{key} {shown(known[key])}" for key in _ROPE if key in known) or "its values"
    with foreign(what):
        known |= _of_family(values, known)
    width, heads = known["hidden_size"], known["num_attention_heads"]
    parts = "head_dim" in known or width % heads == 0
    check(parts, f"num_attention_heads is {heads}, and must divide hidden_size, {width}, as no head_dim is given")
    keys = known.get("num_key_value_heads", heads)
    check(heads % keys == 0, f"num_key_value_heads is {keys}, and must divide num_attention_heads, {heads}")
    even = known.get("head_dim", width // heads)
    check(even % 2 == 0, f"head_dim is {even}, and must be even, for rotary positions")
    with foreign(what):
        llama = LlamaConfig.from_dict(known)
        llama.standardize_rope_params()  # with `_ORIGINAL`, as engines do, which `from_dict` sets too late
        return llama


def _of_family(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What engines read beside what is `known`: the defaults of transformers' class of a draft's `model_type`.

    Empty for Llama, and for a class that does not describe layers. Raises UserError where no rotary settings are named,
    and the class has several."""
    family = values.get("model_type")
    if family == LlamaConfig.model_type or family not in CONFIG_MAPPING:
        return {}
    own = {key: values[key] for key in (_LLAMA4_INNER,) if key in values}
    text = CONFIG_MAPPING[family].from_dict(copy.deepcopy({**known, **own}))
    if getattr(text, "hidden_size", None) != known["hidden_size"]:
        return {}
    found = {key: getattr(text, key, None) for key in _DEFAULTED if key not in known}
    rope = getattr(text, "rope_parameters", None)
    if rope and any(isinstance(value, dict) for value in rope.values()):  # by the type of a layer
        named = any(key in known for key in ("rope_theta", *_ROPE))
        check(named, f"names no rope_theta, and model_type {family} has one for each type of layer; add the draft's")
    else:
        found |= {"rope_parameters": rope}
    if family == "llama4_text":
        found["intermediate_size"] = text.intermediate_size_mlp
    return {key: value for key, value in found.items() if value is not None}


def _sound_rope(key: str, given: Any) -> dict[str, Any]:
    """Rotary settings as they concern a text. Raises UserError for invalid ones."""
    check(isinstance(given, dict), f"{key} is {shown(given)}, and must be a mapping")
    rope = without_sections(given)
    kind, kinds = rope.get("rope_type", "default"), ("default", *ROPE_INIT_FUNCTIONS)
    check(kind in kinds, f"{key} is of type {shown(kind)}, and must be one of {', '.join(kinds)}")
    missing = [name for name in _OF_ROPE.get(kind, ()) if name not in rope]
    check(not missing, f"{key} {shown(rope)} has no {', '.join(missing)}")
    for name, value in rope.items():
        wanted = wanted_of(name, value)
        is_unread = name not in ROPE_KEYS and isinstance(value, bool | list)
        check(wanted is None or is_unread, f"{key}.{name} is {shown(value)}, and must be {wanted}")
    return rope


def _layers_of(tensors: dict[str, torch.Tensor]) -> set[int]:
    return {int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d+)\.", name))}
