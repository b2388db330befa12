"""EAGLE-1 drafts of others as ours: the layouts of EAGLE's own repository, of vLLM and of SGLang.

They share their tensors' names (SERVING: `fc`, then Llama layers) and differ in what else their files hold. Such a file
does not say what it was trained for, so the target is given. Knows nothing of our own artifacts.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from eagle_train.config import UserError, check, one_line
from eagle_train.models.compressed import load_tensors
from eagle_train.models.draft import Draft, DraftConfig
from eagle_train.models.target import Target

PICKLES = "pytorch_model*.bin"  # EAGLE's own, from before safetensors
PREFIX = re.compile(r"^(module\.)?(model\.)?")  # of names, from DDP and from whole models
INDEX = "model.safetensors.index.json"
EAGLE3 = ("midlayer.", "hidden_norm", "d2t", "t2d")
NESTED = ("model", "text_config", "transformer_layer_config")  # of vLLM's own, multimodal and speculators' configs
BESIDE = ("quantization_config", "truncated_vocab_size")  # and what they have beside it
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
BIASES = {
    "qkv_bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
    "o_bias": ("self_attn.o_proj.bias",),
    "mlp_bias": tuple(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")),
}
SHARED = {"embed_tokens.weight": "embedding", "lm_head.weight": "LM head"}  # the target's, where a file repeats them


def load_foreign(directory: Path, target: Target) -> Draft:
    """The draft in fp32. Raises UserError for what is no EAGLE-1 draft, or not one for this target."""
    values = read_values(directory)
    tensors = {PREFIX.sub("", name): tensor for name, tensor in read_files(directory).items()}
    tensors = {name: tensor for name, tensor in tensors.items() if "rotary_emb" not in name}  # computed from the config
    eagle3 = [name for name in tensors if any(mark in name for mark in EAGLE3)]
    check(not eagle3, f"checkpoint={directory}: an EAGLE-3 draft ({eagle3[:1]}); give one of EAGLE-1")
    check("fc.weight" in tensors, f"checkpoint={directory}: no fc.weight there, so it is no EAGLE draft")
    check(
        "quantization_config" not in values,
        f"checkpoint={directory}: is quantised; give the draft that it was made from",
    )
    for name, what in SHARED.items():
        refuse_other(name, what, tensors.pop(name, None), target, directory)
    tensors = without_zero_biases(tensors)
    draft = Draft(shape_of(values, tensors, target, directory))
    load_tensors(draft, tensors, f"checkpoint={directory}")
    return draft


def read_values(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoint={directory}: config.json cannot be read: {one_line(error)}") from error
    check(isinstance(values, dict), f"checkpoint={directory}: config.json holds no mapping")
    return the_drafts_own(values, directory)


def the_drafts_own(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The part of a config.json that describes the draft's layers: all of it, or what it holds under one of NESTED.

    Raises UserError where a number is missing that has no default which everybody shares.
    """
    inner = next((key for key in NESTED if isinstance(values.get(key), dict)), None)
    if "hidden_size" not in values and inner is not None:
        values = {key: value for key, value in values.items() if key in BESIDE} | values[inner]
    missing = [key for key in NEEDED if values.get(key) is None]
    check(not missing, f"checkpoint={directory}: config.json has no {', '.join(missing)}")
    act = values.get("hidden_act", "silu")
    check(act in ("silu", "swish"), f"checkpoint={directory}: hidden_act {act!r} in config.json; a draft has silu")
    part, size = values.get("truncated_vocab_size"), values["vocab_size"]
    whole = part in (None, size)
    check(whole, f"checkpoint={directory}: truncated_vocab_size {part} in config.json; give one of all {size} tokens")
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


def shape_of(values: dict[str, Any], tensors: dict[str, torch.Tensor], target: Target, directory: Path) -> DraftConfig:
    """The draft's config from a Llama-like config.json, and what only the tensors tell: norms and bias."""
    norms = {name for name in ("norm.weight", "layers.0.input_layernorm.weight") if name in tensors}
    check(
        len(norms) != 1,
        f"checkpoint={directory}: has {' '.join(norms)} alone of the first layer's input norm and the final one; "
        "give a draft with both or none",
    )
    known = {key: value for key, value in values.items() if key not in ("architectures", "model_type", "torch_dtype")}
    try:
        llama = LlamaConfig.from_dict(known)
    except Exception as error:  # the library checks values by using them
        raise UserError(f"checkpoint={directory}: config.json is no Llama's: {one_line(error)}") from error
    for name, own in (("hidden_size", target.identity.hidden_size), ("vocab_size", target.identity.vocab_size)):
        given = getattr(llama, name)
        check(given == own, f"checkpoint={directory}: {name} {given} in config.json, and {own} in target {target.name}")
    layers = layers_of(tensors)
    biases = {
        flag: bool(layers) and all(f"layers.{layer}.{name}" in tensors for layer in layers for name in names)
        for flag, names in BIASES.items()
    }
    return DraftConfig.from_target(
        llama,
        num_layers=llama.num_hidden_layers if not layers else max(layers) + 1,
        norms="full" if norms else "eagle1",
        first_token="skip",
        fc_bias="fc.bias" in tensors,
        max_position_embeddings=None if "max_position_embeddings" in values else target.max_positions,
        **biases,
    )


def layers_of(tensors: dict[str, torch.Tensor]) -> set[int]:
    return {int(found[1]) for name in tensors if (found := re.match(r"layers\.(\d+)\.", name))}
