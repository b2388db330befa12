"""EAGLE-1 drafts of others as ours: the layouts of EAGLE's own repository, of vLLM and of SGLang.

They share their tensors' names (SERVING: `fc`, then Llama layers) and differ in what else their files hold. Such a file
does not say what it was trained for, so the target is given. Knows nothing of our own artifacts.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_train.artifacts.compressed_tensors_format import load_tensors
from eagle_train.errors import UserError, check, foreign, one_line, shown
from eagle_train.models.directory import read_mapping
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.target import Target

PICKLES = "pytorch_model*.bin"  # EAGLE's own, from before safetensors
PREFIX = re.compile(r"^(module\.)?(model\.)?")  # of names, from DDP and from whole models
INDEX = "model.safetensors.index.json"
EAGLE3 = ("midlayer.", "hidden_norm", "d2t", "t2d")
NESTED = ("model", "text_config", "transformer_layer_config")  # of vLLM's own, multimodal and speculators' configs
PARTS = ("truncated_vocab_size", "draft_vocab_size")  # of the vocabulary
BESIDE = ("quantization_config", *PARTS)  # and what they have beside it
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
COUNTS = (*NEEDED, "num_key_value_heads", "head_dim", "num_hidden_layers", "max_position_embeddings")
NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
ROPE = ("rope_scaling", "rope_parameters")
OF_ROPE = dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)) | {
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
RENAMED = {"fusion_fc.": "fc.", "transformer.": "layers.0."}  # speculators' names, and everybody's
BIASES = {
    "qkv_bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "o_bias": ("self_attn.o_proj.bias",),
    "mlp_bias": tuple(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")),
}
SHARED = {"embed_tokens.weight": "embedding", "lm_head.weight": "LM head"}  # the target's, where a file repeats them


def load_foreign(directory: Path, target: Target) -> Draft:
    """The draft in fp32. Raises UserError for what is no EAGLE-1 draft, or not one for this target."""
    values = read_values(directory)
    tensors = {everybodys(name): tensor for name, tensor in read_files(directory).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if "rotary_emb" not in name}  # computed from the config
    eagle3 = [name for name in tensors if any(mark in name for mark in EAGLE3)]
    check(not eagle3, f"checkpoint={directory}: an EAGLE-3 draft ({eagle3[:1]}); give one of EAGLE-1")
    check("fc.weight" in tensors, f"checkpoint={directory}: no fc.weight there, so it is no EAGLE draft")
    check(
        "quantization_config" not in values,
        f"checkpoint={directory}: is quantised; give the draft that it was made from",
    )
    normed = "embedding_layernorm.weight" in tensors
    check(not normed, f"checkpoint={directory}: has a norm after the embedding (layernorms); no draft here has one")
    norms = {name for name in ("norm.weight", "layers.0.input_layernorm.weight") if name in tensors}
    check(
        len(norms) != 1,
        f"checkpoint={directory}: has {' '.join(norms)} alone of the first layer's input norm and the final one; "
        "give a draft with both or none",
    )
    for name, what in SHARED.items():
        refuse_other(name, what, tensors.pop(name, None), target, directory)
    tensors = without_zero_biases(tensors)
    try:
        draft = Draft(shape_of(values, tensors, target))
    except UserError as error:
        raise UserError(f"checkpoint={directory}: config.json: {error}") from error
    load_tensors(draft, tensors, f"checkpoint={directory}")
    return draft


def everybodys(name: str) -> str:
    """A tensor's name without prefixes."""
    name = PREFIX.sub("", name)
    theirs = next((begun for begun in RENAMED if name.startswith(begun)), None)
    return name if theirs is None else RENAMED[theirs] + name.removeprefix(theirs)


def read_values(directory: Path) -> dict[str, Any]:
    return the_drafts_own(read_mapping(directory / "config.json", f"checkpoint={directory}"), directory)


def the_drafts_own(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The part of a config.json that describes the draft's layers: all of it, or what it holds under one of NESTED.

    Without what is null. Raises UserError where a number is missing that has no default which everybody shares.
    """
    inner = next((key for key in NESTED if isinstance(values.get(key), dict)), None)
    if inner is not None and any(values.get(key) is None for key in NEEDED):
        values = {key: value for key, value in values.items() if key in BESIDE} | values[inner]
    values = {key: value for key, value in values.items() if value is not None}
    missing = [key for key in NEEDED if key not in values]
    check(not missing, f"checkpoint={directory}: config.json has no {', '.join(missing)}")
    act = values.get("hidden_act", "silu")
    check(act in ("silu", "swish"), f"checkpoint={directory}: hidden_act {act!r} in config.json; a draft has silu")
    size = values["vocab_size"]
    for key in PARTS:
        whole = values.get(key, size) == size
        check(whole, f"checkpoint={directory}: {key} {values.get(key)} in config.json; give one of all {size} tokens")
    return values


def without_zero_biases(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same without biases that are zero wherever their modules are: SGLang's layout asks for them."""
    kinds = [re.sub(r"\d+", "", name) for name in tensors]
    used = {kind for kind, tensor in zip(kinds, tensors.values(), strict=True) if tensor.any()}
    for names in BIASES.values():
        if any(f"layers..{name}" in used for name in names):  # they come together
            used |= {f"layers..{name}" for name in names}
    return {
        name: tensor
        for (name, tensor), kind in zip(tensors.items(), kinds, strict=True)
        if kind in used or not name.endswith(".bias")
    }


def read_files(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the directory's safetensors, one file or several, or else of its pickles."""
    index = directory / INDEX
    pickles = sorted(directory.glob(PICKLES))
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        if (directory / names[0]).is_file() or not pickles:
            parts = [load_file(directory / name) for name in names]
        else:
            parts = [torch.load(path, map_location="cpu", weights_only=True) for path in pickles]
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(f"checkpoint={directory}: its weights cannot be read: {one_line(error)}") from error
    return {name: tensor for part in parts for name, tensor in part.items()}


def refuse_other(name: str, what: str, found: torch.Tensor | None, target: Target, directory: Path) -> None:
    """A draft runs with the target's embedding and LM head; a file with others was made for another target."""
    if found is None:
        return
    own = (target.embedding if what == "embedding" else target.lm_head.weight).cpu()
    # They may be of different precisions, and fp16 has no numbers as small as bf16's: alike in either is alike. An LM
    # head that nobody reads may hold anything of another shape.
    alike = (torch.equal(found.to(dtype), own.to(dtype)) for dtype in (torch.bfloat16, found.dtype))
    same = found.shape == own.shape and any(alike)
    check(same, f"checkpoint={directory}: its {name} is not the {what} of {target.name}; give the target it is for")


def shape_of(values: dict[str, Any], tensors: dict[str, torch.Tensor], target: Target) -> DraftConfig:
    """The draft's config from a Llama-like config.json, and what only the tensors tell: norms and bias."""
    llama = llama_of(values)
    for name, own in (("hidden_size", target.identity.hidden_size), ("vocab_size", target.identity.vocab_size)):
        given = getattr(llama, name)
        check(given == own, f"{name} is {given}, and {own} in target {target.name}")
    layers = layers_of(tensors)
    biases = {
        flag: bool(layers) and all(f"layers.{layer}.{name}" in tensors for layer in layers for name in names)
        for flag, names in BIASES.items()
    }
    return DraftConfig.from_target(
        llama,
        num_layers=llama.num_hidden_layers if not layers else max(layers) + 1,
        norms="full" if "norm.weight" in tensors else "eagle1",
        first_token="skip",
        fc_bias="fc.bias" in tensors,
        max_position_embeddings=None if "max_position_embeddings" in values else target.max_positions,
        **biases,
    )


def llama_of(values: dict[str, Any]) -> LlamaConfig:
    """What of a config.json says how a Llama's layers compute. Raises UserError, with the value, for what cannot be."""
    for key in COUNTS:
        value = values.get(key, 1)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        check(is_count, f"{key} is {shown(value)}, and must be a whole number of 1 or more")
    for key in NUMBERS:
        check(_is_positive(values.get(key, 1)), f"{key} is {shown(values.get(key))}, and must be a number above 0")
    width, heads = values["hidden_size"], values["num_attention_heads"]
    parts = "head_dim" in values or width % heads == 0
    check(parts, f"num_attention_heads is {heads}, and must divide hidden_size, {width}, where no head_dim is given")
    keys = values.get("num_key_value_heads", heads)
    check(heads % keys == 0, f"num_key_value_heads is {keys}, and must divide num_attention_heads, {heads}")
    even = values.get("head_dim", width // heads)
    check(even % 2 == 0, f"head_dim is {even}, and must be even, for rotary positions")
    for key in ROPE:
        _check_rope(key, values.get(key, {}))
    known = {key: values[key] for key in (*COUNTS, *NUMBERS, *ROPE) if key in values}
    with foreign(" and ".join(f"{key} {shown(known[key])}" for key in ROPE if key in known) or "as a Llama's"):
        return LlamaConfig.from_dict(known)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_rope(key: str, rope: Any) -> None:
    check(isinstance(rope, dict), f"{key} is {shown(rope)}, and must be a mapping")
    kind, kinds = rope.get("rope_type", rope.get("type", "default")), ("default", *ROPE_INIT_FUNCTIONS)
    check(kind in kinds, f"{key} is of type {shown(kind)}, and must be one of {', '.join(kinds)}")
    missing = [name for name in OF_ROPE.get(kind, ()) if name not in rope]
    check(not missing, f"{key} {shown(rope)} has no {', '.join(missing)}")
    for name, value in rope.items():
        right = name in ("rope_type", "type") or isinstance(value, bool | list | None) or _is_positive(value)
        check(right, f"{key}.{name} is {shown(value)}, and must be a number above 0")


def layers_of(tensors: dict[str, torch.Tensor]) -> set[int]:
    return {int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d+)\.", name))}
