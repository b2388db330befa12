"""Whether a checkpoint on this disk holds a model's weights, told by its files' headers. No weight is read. DESIGN 3.4.

Safetensors' headers tell names, shapes and types, and so do pickles whose numbers are not looked at.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from eagle_train.errors import UserError, check, foreign
from eagle_train.models.directory import weight_files
from eagle_train.models.head import head_of
from eagle_train.ops.tensor_files import check_opens

FLOATS = ("F64", "F32", "F16", "BF16")  # types that are a weight's own numbers
PICKLED = dict(zip((torch.float64, torch.float32, torch.float16, torch.bfloat16), FLOATS, strict=True))
SAFE = "give a checkpoint in safetensors, as save_pretrained() writes"
UNQUANTISED = (
    "which is quantised, and config.json has no quantization_config; copy config.json from where the weights come from"
)


@dataclass(frozen=True)
class _Stored:
    """A tensor as a file's header tells it. `dtype`: as safetensors names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: str


def _headers(path: Path, place: str) -> list[_Stored]:
    """All tensors in a checkpoint's files, but for pickles from before torch 1.6; none where it has no such files.
    Raises UserError for a file that is damaged or ends early."""
    found = []
    for file in weight_files(path, place):
        if file.suffix != ".safetensors":
            found += _pickled(file, place) if is_zipfile(file) else []
            continue
        damaged = f"{place}: {file.name} is damaged or ends too early, download it again"
        with foreign(f"{place}: {file.name} cannot be read"):
            check_opens(file)
        with foreign(damaged), safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is no mapping
                part = tensors.get_slice(name)
                found.append(_Stored(name, tuple(part.get_shape()), part.get_dtype(), file.name))
    return found


def _pickled(file: Path, place: str) -> list[_Stored]:
    """The tensors of a pickle of weights, whose numbers stay on the disk. Raises UserError for another pickle."""
    try:
        tensors = torch.load(file, map_location="meta", mmap=True, weights_only=True)
    except Exception as error:  # torch says at length how to run whatever the file holds
        raise UserError(f"{place}: {file.name} is damaged, or holds more than weights; {SAFE}") from error
    check(
        isinstance(tensors, dict) and all(isinstance(each, torch.Tensor) for each in tensors.values()),
        f"{place}: {file.name} holds more than weights; {SAFE}",
    )
    return [
        _Stored(name, tuple(each.shape), PICKLED.get(each.dtype, str(each.dtype)), file.name)
        for name, each in tensors.items()
    ]


@dataclass(frozen=True)
class _Held:
    """A model's tensors by what the files hold of them. `whole`: those that a file holds as they are."""

    names: frozenset[str]
    whole: dict[str, _Stored]
    others: tuple[_Stored, ...]
    is_told: bool  # whether all names are known: none is made of a part of a stored tensor


def _held(model: PreTrainedModel, stored: list[_Stored]) -> _Held:
    """Which of the model's tensors are stored, by transformers' own renaming of checkpoints' tensors."""
    rules, own = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in rules if isinstance(each, WeightRenaming)]
    converters = [each for each in rules if isinstance(each, WeightConverter)]
    names, whole, others, is_told = set(), {}, [], True
    for each in stored:
        name, pattern = rename_source_key(each.name, renamings, converters, model.base_model_prefix, own)
        if name not in own:  # transformers gives up on the rules, but for the prefix, where they lead nowhere
            name, pattern = rename_source_key(each.name, [], [], model.base_model_prefix, own)
        if name not in own:
            others.append(each)
        elif pattern is None:
            whole[name] = each
        else:
            (converter,) = [rule for rule in converters if pattern in rule.source_patterns][:1]
            is_told = is_told and len(converter.target_patterns) == 1
        names.add(name)
    return _Held(frozenset(names), whole, tuple(others), is_told)


def check_stored(path: Path, model: PreTrainedModel, is_quantised: bool, place: str) -> None:
    """Raise UserError where a directory's files do not hold the weights of a model, built without memory for them.

    `is_quantised`: as the checkpoint's config says; then only embedding and LM head are looked for, for how the rest is
    stored is its library's own. `place` begins the message.
    """
    stored = _headers(path, place)
    if not stored:
        return
    there = _held(model, stored)
    ends: dict[str, Any] = {"embedding": model.get_input_embeddings(), "LM head": head_of(model)}
    if not is_quantised:
        _check_numbers(model, there, place)
    aliases = defaultdict(list)  # of tied weights one is stored
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases[id(parameter)].append(name)
    for role, module in ends.items():
        names = aliases[id(module.weight)]
        known = {name.removesuffix("weight") for name in names}
        parts = (each.name for each in there.others)  # of a quantised matrix
        is_there = there.names.intersection(names) or (
            is_quantised and any(part.startswith(tuple(known)) for part in parts)
        )
        check(bool(is_there), f"{place}: no file has the {role}, {names[0]}{_untied(model, role)}")
    _check_shapes(model, there, is_quantised, place)
    missing = [names[0] for names in aliases.values() if not there.names.intersection(names)]
    check(
        is_quantised or not there.is_told or not missing,
        f"{place}: {len(missing)} weights are missing, {missing[:1]} first; give a complete checkpoint",
    )


def _untied(model: PreTrainedModel, role: str) -> str:
    """What may be wrong where an end of the model is not there."""
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", None)
    if role == "LM head" and not tied:
        return (
            ", and config.json has no tie_word_embeddings=true; give a complete checkpoint of a causal language model"
        )
    return "; give a complete checkpoint of a causal language model"


def _check_numbers(model: PreTrainedModel, there: _Held, place: str) -> None:
    """Raise UserError for weights in a type that is no weight's, or packed: quantised, and nothing says how."""
    own, modules = model.state_dict(), {name for name, _ in model.named_modules()}
    for name, each in there.whole.items():
        check(
            each.dtype in FLOATS or not own[name].is_floating_point(),
            f"{place}: {each.name} in {each.file} is of type {each.dtype}, {UNQUANTISED}",
        )
    for each in there.others:
        owner, _, part = each.name.rpartition(".")
        is_packed = each.dtype not in FLOATS and f"{owner}.weight" not in there.names and owner in modules
        check(not is_packed, f"{place}: {owner} has a {part} of type {each.dtype} in {each.file}, {UNQUANTISED}")


def _check_shapes(model: PreTrainedModel, there: _Held, is_quantised: bool, place: str) -> None:
    """Raise UserError for a stored tensor whose shape the config contradicts."""
    text = model.config.get_text_config()
    for name, tensor in model.state_dict().items():
        each = there.whole.get(name)
        if each is None or (is_quantised and each.dtype not in FLOATS) or each.shape == tuple(tensor.shape):
            continue
        sizes = {key: getattr(text, key) for key in ("vocab_size", "hidden_size") if getattr(text, key) in tensor.shape}
        said = ", ".join(f"{key}={size}" for key, size in sizes.items())
        raise UserError(
            f"{place}: {each.name} has shape {list(each.shape)} in {each.file}, and config.json "
            f"{f'({said}) ' if said else ''}makes it {list(tensor.shape)}; give the config.json of these weights"
        )
